"""Which nodes are present for a job's next round, whether they are enough, their ranks, and how
long new ones wait where nodes come and go.

    fewer than MIN ---MIN are here---> last call ---it is over, or MAX are here---> complete

A member is known by its key, which no other agent ever has: a restarted one is another member.
Members join at any time; those present when a round is formed take part, up to MAX, those of the
previous round first. `now` and events go in; no socket or clock here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base.record import Record
from rallypoint.rendezvous.job.round import Member

FREE_CHANGES = 4
MEMORY_S = 300.0
_ONE_LOSS_S = 1.0  # nodes lost within this time of each other, as behind one switch, are one change
_LONGEST_PAUSE_S = 60.0
FREE_SHORT_LIVES = 2
_MOST_LIVES = 60.0  # that newcomers wait
SHORT_LIFE_S = 20.0  # longer than it takes to give one up that cannot be reached


class Flapping:
    """The changes of the last minutes.

    Nodes join and leave free of charge, so one that dies every second could stop all others. So
    after a few such changes new nodes wait, longer each time, and are admitted together.

    Attributes:
        is_reported: whether the user knows that new nodes wait.
    """

    def __init__(self) -> None:
        self.is_reported = False
        self._changes: list[float] = []  # when rounds ended as nodes came or went
        self._lost_at = -_ONE_LOSS_S  # when the newest of them ended as nodes went

    def count(self, now: float, *, came: bool) -> None:
        """A round ended because nodes joined or left."""
        if came or now - self._lost_at >= _ONE_LOSS_S:
            self._changes.append(now)
        if not came:
            self._lost_at = now

    def pause_s(self, now: float) -> float:
        """How long a round runs at least before new nodes end it."""
        self._changes = [at for at in self._changes if now - at < MEMORY_S]
        excess = len(self._changes) - FREE_CHANGES
        self.is_reported = self.is_reported and excess > 0
        return min(2.0**excess, _LONGEST_PAUSE_S) if excess > 0 else 0.0

    @property
    def text(self) -> str:
        """Why new nodes wait."""
        return (
            f"nodes came or went {len(self._changes)} times in the last {MEMORY_S / 60:.0f}"
            " minutes, so new nodes are admitted together"
        )


class ShortLives:
    """Workers that joined others, which continue in place, and were lost soon, time after time.

    The next ones wait, too, and longer than the last ones lived, as the others may have waited for
    those all that time. Where others were also lost, it was not the newcomers' fault, and places
    must not stay empty.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._lived_s = 0.0

    def count(self, lived_s: float, *, newcomers_lost: int, others_lost: int) -> None:
        """A round is over in which workers had joined, or others were lost."""
        is_short = newcomers_lost and not others_lost and lived_s < SHORT_LIFE_S
        self._in_a_row = self._in_a_row + 1 if is_short else 0
        self._lived_s = lived_s

    @property
    def pause_s(self) -> float:
        """How long a round runs at least before others of them join."""
        excess = self._in_a_row - FREE_SHORT_LIVES
        lives = min(2.0 ** (excess - 1), _MOST_LIVES) if excess > 0 else 0.0
        return max(self._lived_s, 1.0) * lives

    @property
    def text(self) -> str:
        """Why they wait."""
        return f"workers that joined were lost soon after it {self._in_a_row} times in a row"


MAX_SHOWN = 16


class Limits(Record, kw_only=True):
    """When a rendezvous is complete.

    Attributes:
        min_nodes, max_nodes: how many members a round may have.
        join_timeout_s: how long to wait for MIN of them.
        last_call_s: how long to wait for more, once there are MIN for the first time.
        is_fixed: the members are known from the start, by their ranks; one that is lost is not
            replaced, and only those of the first round take part in later ones.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    join_timeout_s: float = 600.0
    last_call_s: float = 3.0
    is_fixed: bool = False


class Gathering:
    """The members that are present, in the order in which they joined.

    Attributes:
        here: by key.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.here: dict[str, Member] = {}
        self._requested: dict[int, Member] = {}
        self._deadline = 0.0
        self._last_call: float | None = None
        self._expected: set[str] | None = None
        self._has_formed = False

    def expect(self, keys: set[str]) -> None:
        """It is complete once each of these former members is here or gone, and not earlier: their
        workers may be the only ones that can continue.
        """
        self._expected = keys

    def open(self, now: float) -> None:
        """Wait for members from now on. Present members need no last call: all know it."""
        self._deadline = now + self.limits.join_timeout_s
        self._last_call = now if self._are_enough() else None

    def join(self, member: Member, now: float) -> str:
        """Admit a member; returns why not, if it cannot join."""
        refusal = self._refusal(member)
        if refusal:
            return refusal
        self.here[member.key] = member
        if member.wish is not None:
            self._requested[member.wish] = member
        if self._expected is not None:
            self._expected.discard(member.key)
        if self._last_call is None and self._are_enough():
            self._last_call = now + self.limits.last_call_s
        return ""

    def leave(self, key: str) -> Member | None:
        """A member is gone."""
        member = self.here.pop(key, None)
        if member is not None and member.wish is not None:
            del self._requested[member.wish]
        if self._expected is not None:
            self._expected.discard(key)
        if not self._are_enough():
            self._last_call = None
        return member

    @property
    def wake_at(self) -> float:
        """When `is_complete` or `is_over` may change without an event."""
        return self._deadline if self._last_call is None or self._expected else self._last_call

    def holder_of(self, rank: int | None) -> str:
        """The key of the node that joined with that rank; empty: none did."""
        holder = None if rank is None else self._requested.get(rank)
        return "" if holder is None else holder.key

    def is_complete(self, now: float) -> bool:
        """Whether a round can be formed."""
        if self._expected:
            return False
        if len(self.here) >= self.limits.max_nodes:
            return True
        if self._expected is not None and self._are_enough():
            return True
        return self._last_call is not None and now >= self._last_call

    def is_over(self, now: float) -> bool:
        """Whether the time to wait is over."""
        return now >= self._deadline and not self._are_enough()

    def text(self) -> str:
        """``"3/4 nodes joined; missing node-rank 2"``."""
        limits = self.limits
        if limits.is_fixed:
            taken = {member.wish for member in self.here.values()}
            absent = [str(rank) for rank in range(limits.max_nodes) if rank not in taken]
            return (
                f"{len(self.here)}/{limits.max_nodes} nodes joined; missing node-rank "
                f"{shorten(absent)}"
            )
        names = sorted((member.host for member in self.here.values()), key=natural)
        is_range = limits.min_nodes != limits.max_nodes
        wanted = f"at least {limits.min_nodes}" if is_range else str(limits.max_nodes)
        missing = limits.min_nodes - len(self.here)
        return f"{len(self.here)} of {wanted} nodes joined ({shorten(names)}); missing {missing}"

    def form(self, before: Sequence[Member]) -> tuple[Member, ...]:
        """The members of the next round, by rank."""
        self._has_formed = True
        ranks = {member.key: member.node_rank for member in before if member.node_rank >= 0}
        order = sorted(self.here.values(), key=lambda member: member.key not in ranks)
        return assign(order[: self.limits.max_nodes], ranks)

    def _refusal(self, member: Member) -> str:
        wish = member.wish
        if wish is None:
            return ""
        other = self._requested.get(wish)
        if other is not None:
            return (
                f"node rank {wish} is taken by host {other.host!r}; this is {member.host!r}: give "
                "each node its own --node-rank"
            )
        if wish >= self.limits.max_nodes:
            return f"--node-rank {wish} is too large for {self.limits.max_nodes} nodes"
        if self.limits.is_fixed and self._has_formed:
            return "the job has already begun, and no node can replace one that was lost"
        return ""

    def _are_enough(self) -> bool:
        return len(self.here) >= self.limits.min_nodes


def assign(members: Sequence[Member], before: Mapping[str, int]) -> tuple[Member, ...]:
    """Assign ranks 0, 1, ...: requested ones first, then those of the previous round, then the free
    ones in the natural order of host names, and of keys if those are the same.

    A requested rank that is too large for so few members is ignored.
    """
    ranks: dict[int, Member] = {}
    rest = []
    for member in members:
        if member.wish is not None and member.wish < len(members):
            ranks[member.wish] = member
        else:
            rest.append(member)
    new = []
    for member in rest:
        rank = before.get(member.key, len(members))
        if rank < len(members) and rank not in ranks:
            ranks[rank] = member
        else:
            new.append(member)
    # Members that stay come before new ones, in the order of their old ranks.
    new.sort(key=lambda each: (before.get(each.key, len(before)), natural(each.host), each.key))
    free = [rank for rank in range(len(members)) if rank not in ranks]
    ranks.update(zip(free, new, strict=True))
    return tuple(ranks[rank].__replace__(node_rank=rank) for rank in range(len(members)))


def shorten(names: Sequence[str]) -> str:
    """The first of these, for a message."""
    return ", ".join(names[:MAX_SHOWN]) + ", ..." * (len(names) > MAX_SHOWN)


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """A key for sorting that puts node7 before node66."""
    import re  # only jobs of several nodes pay for it

    parts = [part for part in re.split("([0-9]+)", name) if part]
    return tuple([(not each.isdigit(), int(each) if each.isdigit() else 0, each) for each in parts])
