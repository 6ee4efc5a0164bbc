"""Workers' complaints of a round, and what follows from them: hangs to report, ranks to end. Pure.

    an agent -- LongWaits, TimedOut, ContactLost --> the agent that coordinates (complaint_watch.py)
    an agent <------------ EndRank ----------------- the agent that coordinates

They travel as inquiries (rounds/source.py), as the messages of inspection/requests.py do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from rallypoint.base.record import Record

# Of the time after which a wait is long, where ranks wait for one that a signal has stopped: it
# cannot just be computing.
STOPPED_SHARE = 0.1
_STOPPED, _RAISED = "stopped", "raised"  # these causes, as `explain` names them
_ALMOST = 0.9  # of the time; clocks are coarse
_EXPLAINED = 3  # the status that `explain` would exit with


class LongWaits(Record):
    """A worker of the sender's node waits for long, or did.

    Attributes:
        is_stopped: it does not wait, but a signal has stopped it.
    """

    round: int
    rank: int
    seconds: float
    is_over: bool
    is_stopped: bool = False


class TimedOut(Record):
    """The sender's `rank` waited for `culprit` until a call of `ranks` (empty: all) timed out."""

    round: int
    rank: int
    culprit: int
    ranks: tuple[int, ...] = ()


class ContactLost(Record):
    """`rank`, of the sender's node, cannot reach `culprit`; as control_message.LostContact."""

    round: int
    rank: int
    culprit: int
    had_formed: bool


class EndRank(Record):
    """The node that has this rank is to kill it."""

    round: int
    rank: int
    because: str


Complaint = LongWaits | TimedOut | ContactLost
AgentMessage = Complaint | EndRank


class Hang(Record, kw_only=True):
    """One hang.

    Attributes:
        sentence: the cause, as `explain` words it.
        is_explained: the cause is known, and not only that the job hangs.
        rank: the rank at fault, or else one that waits.
        ranks: those at fault, and all that wait for them.
        root: the cause, and the ranks at fault.
        calls: the calls in which ranks wait.
    """

    sentence: str
    is_explained: bool
    rank: int
    ranks: frozenset[int]
    root: tuple[str, tuple[int, ...]]
    calls: frozenset[tuple[str, str, int | None]]

    @property
    def text(self) -> str:
        """The line for the user."""
        return f"the job {'hangs' if self.is_explained else 'may hang'}: {self.sentence}"

    @property
    def past(self) -> str:
        """The same, after the job was ended for it; part of a sentence."""
        verb = "hung" if self.is_explained else "may have hung"
        return f"the job {verb}: {self.sentence.removesuffix('.')}"

    @property
    def waiting(self) -> frozenset[int]:
        """The ranks that wait for those at fault."""
        return self.ranks - set(self.root[1])

    @property
    def event(self) -> dict[str, object]:
        """The event for programs."""
        cause, ranks = self.root
        return {
            "sentence": self.sentence,
            "is_explained": self.is_explained,
            "cause": cause,
            "ranks": list(ranks),
            "waiting": sorted(self.waiting),
        }

    def is_same(self, other: Hang) -> bool:
        """Whether both are the same hang for the user."""
        return self.root == other.root and (
            self.calls == other.calls or not self.calls.isdisjoint(other.calls)
        )


class Hangs:
    """The hangs of one round.

    A worker that has waited for too long complains, and the whole job is inspected as by
    `rallypoint explain`. A hang is reported once, if the worker is part of it; again only for
    another root cause or other calls, or once its cause is known.

    Args:
        after_s: shorter waits are ignored.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._complaining: set[int] = set()
        self._reported: Hang | None = None

    @property
    def is_reported(self) -> bool:
        """Whether a hang was reported that is not over."""
        return self._reported is not None

    def complains(self, rank: int) -> None:
        """That rank has waited for too long."""
        self._complaining.add(rank)

    def goes_on(self, rank: int, *, was_stopped: bool = False) -> bool:
        """That rank no longer waits, or is not stopped now; whether this ends a reported hang.

        One at fault may have waited for something else; but in a circle all are.
        """
        self._complaining.discard(rank)
        reported = self._reported
        if reported is None:
            return False
        ended_by = reported.root[1] if was_stopped else reported.waiting or reported.ranks
        if rank not in ended_by or (was_stopped and reported.root[0] != _STOPPED):
            return False
        self._reported = None
        return True

    def judge(self, explanation: Mapping[str, Any]) -> Hang | None:
        """The hang to report, if the job's explanation is one."""
        hang = _hang(explanation, self._after_s)
        if hang is None or hang.ranks.isdisjoint(self._complaining):
            return None
        last = self._reported
        if last is not None and last.is_same(hang) and last.is_explained >= hang.is_explained:
            return None
        self._reported = hang
        return hang


def _hang(explanation: Mapping[str, Any], after_s: float) -> Hang | None:
    if not explanation.get("exit_status") or not explanation["roots"]:
        return None
    root = explanation["roots"][0]
    ranks = frozenset([*root["ranks"], *root["waited_for_by"]])
    edges = [edge for edge in explanation["edges"] if not ranks.isdisjoint(edge["ranks"])]
    known = [edge["for_s"] for edge in edges if edge["for_s"] is not None]
    is_stopped = root["cause"] == _STOPPED
    share = STOPPED_SHARE if is_stopped else 1.0
    # One that has raised an exception has not ended for that long already, as its agent has seen.
    is_short = known and max(known) < _ALMOST * share * after_s and root["cause"] != _RAISED
    if not ranks or is_short:
        return None
    if is_stopped and not root["waited_for_by"]:
        return None  # the others compute still
    return Hang(
        sentence=str(explanation["sentence"]),
        is_explained=explanation["exit_status"] == _EXPLAINED,
        rank=min(root["ranks"] or ranks),
        ranks=ranks,
        root=(root["cause"], tuple(root["ranks"])),
        calls=frozenset((edge["group"], edge["operation"], edge["number"]) for edge in edges),
    )


# All ranks of a group learn of a timeout within milliseconds; they need the processor to report it.
GRACE_S = 1.0


class _Complaints:
    """Complaints of one kind, which are judged once, when all have had the time to report.

    Attributes:
        judge_at: when that is; None: no report has come, or it is over.
    """

    def __init__(self, world_size: int) -> None:
        self.judge_at: float | None = None
        self._world = range(world_size)
        self._is_judged = False

    def _comes(self, now: float) -> bool:
        """Whether a complaint that comes now counts."""
        if self.judge_at is None and not self._is_judged:
            self.judge_at = now + GRACE_S
        return not self._is_judged


class TimedOutCalls(_Complaints):
    """Calls that timed out as some ranks did not come.

    Workers that can continue without others report whom they have waited for. That rank may have
    waited for another one in its turn, so the culprit is the rank that reports nothing:

        rank 0 --waits for--> rank 1 --waits for--> rank 2, which is stopped
        0 and 1 report that they waited for 1; 2 reports nothing, and is at fault
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._reporting: set[int] = set()
        self._culprits: set[int] = set()
        self._members: set[int] = set()

    def report(self, rank: int, culprit: int, members: Collection[int], now: float) -> None:
        """A call of that rank timed out as it waited for `culprit`.

        `members` are the ranks of the call; empty: all.
        """
        if self._comes(now):
            self._reporting.add(rank)
            self._culprits.add(culprit)
            self._members.update(members or self._world)

    def judge(self) -> list[int]:
        """The ranks at fault; none: all take part by now."""
        self.judge_at, self._is_judged = None, True
        silent = self._members.intersection(self._world) - self._reporting
        return sorted(silent & self._culprits or silent)


class LostContacts(_Complaints):
    """Ranks that cannot reach each other, though none was lost.

    A network that was silent for some seconds breaks connections that nothing repairs, so at first
    all form a new group. If they cannot, ranks complain of those to which they have tried to
    connect, or of rank 0 if it is the store at its host. It is hosts that cannot reach each other;
    the best choice is the smallest set without which no rank complains:

        host A complains of B, and B of A, but C of neither: without B, the others can continue
        B and C complain of A: without A

    At fault are those ranks of such a host that complain, or of which others do: the path to the
    others may be in order.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._pairs: set[tuple[int, int]] = set()

    def report(self, rank: int, culprit: int, now: float, *, had_formed: bool) -> None:
        """That rank cannot reach `culprit` (-1: unknown).

        `had_formed`: it could when this round began.
        """
        is_known = rank in self._world and culprit in self._world
        if self._comes(now) and is_known and not had_formed and culprit != rank:
            self._pairs.add((rank, culprit))

    def judge(self, node_of: Callable[[int], int]) -> list[int]:
        """The ranks at fault; none: all shall try again.

        Args:
            node_of: the number of a rank's host.
        """
        self.judge_at, self._is_judged = None, True
        nodes = _without_whom({(node_of(a), node_of(b)) for a, b in self._pairs})
        apart = [pair for pair in self._pairs if node_of(pair[0]) != node_of(pair[1])]
        at_fault = {rank for pair in apart for rank in pair if node_of(rank) in nodes}
        together = self._pairs.difference(apart)
        return sorted(
            at_fault | _without_whom(each for each in together if at_fault.isdisjoint(each))
        )


def _without_whom(pairs: Iterable[tuple[int, int]]) -> set[int]:
    """Members of all of these pairs, as few as are found by taking the most frequent first."""
    left = {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}
    found = set[int]()
    while left:
        often = Counter(each for pair in left for each in pair)
        worst = max(often, key=lambda each: (often[each], each))
        found.add(worst)
        left = {pair for pair in left if worst not in pair}
    return found
