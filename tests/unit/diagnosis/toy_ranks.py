"""Ranks that run scripts of calls, one step at a time, until nobody can go on.

What `rallypoint.diagnosis` is held to: it knows who waits for whom by running the calls, without
any graph. Sends wait for their receives. `completes` asks whether a rank could go on if some
others did all that it may want of them; from that, by trying all sets, follow who must move.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import permutations

SYMMETRIC = ("all_reduce", "barrier")
FROM_ROOT = "broadcast"
TO_ROOT = "reduce"


@dataclass(frozen=True)
class Op:
    """kind: a collective's name, "send", "recv", "sleep", "exit"; peer, root: global ranks."""

    kind: str
    group: int = 0
    root: int = -1
    peer: int = -1
    tag: int = 0
    count: int = 8
    in_background: bool = False

    @property
    def is_collective(self) -> bool:
        return self.kind in (*SYMMETRIC, FROM_ROOT, TO_ROOT)


@dataclass
class Begun:
    """A call of a rank; number: of a collective in its group."""

    op: Op
    number: int
    at: int
    is_done: bool = False


@dataclass
class Toy:
    """All ranks. A frozen one has made its call, but takes no part in it any more; nor does one
    that has ended, in what it had begun."""

    groups: list[tuple[int, ...]]
    scripts: list[list[Op]]
    frozen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.begun: list[list[Begun]] = [[] for _ in self.scripts]
        self.places = [0] * len(self.scripts)
        self.clock = 0

    def current(self, rank: int) -> Begun | None:
        """The call that it waits for."""
        last = self.begun[rank][-1] if self.begun[rank] else None
        return last if last and not last.is_done and not last.op.in_background else None

    def state(self, rank: int) -> str:
        """ "blocked", "frozen", "exit", or "free" (it sleeps or computes)."""
        if rank in self.frozen:
            return "frozen"
        if self.current(rank):
            return "blocked"
        script, place = self.scripts[rank], self.places[rank]
        return "exit" if place < len(script) and script[place].kind == "exit" else "free"

    def begin(self, rank: int) -> bool:
        """Make its next call, if it can."""
        script = self.scripts[rank]
        if self.current(rank) or self.places[rank] >= len(script):
            return False
        op = script[self.places[rank]]
        if op.kind in ("sleep", "exit"):
            return False
        self.places[rank] += 1
        self.clock += 1
        number = sum(
            each.op.is_collective and each.op.group == op.group for each in self.begun[rank]
        )
        self.begun[rank].append(Begun(op, number, self.clock))
        return True

    def finish(self, rank: int, draw: random.Random) -> bool:
        """End one of its calls that can end; a send and its receive end together."""
        if rank in self.frozen or self.state(rank) == "exit":
            return False
        for mine in [each for each in self.begun[rank] if not each.is_done]:
            if not self._can_end(rank, mine):
                continue
            if mine.op.kind == "send":
                continue  # ended by the receive
            if mine.op.kind == "recv":
                sender = draw.choice(self._senders(rank, mine.op))
                call = self.current(sender)
                assert call is not None
                call.is_done = True
            self.clock += 1
            mine.is_done = True
            return True
        return False

    def run(self, draw: random.Random, steps: int = 10**6) -> None:
        """Go on in random order, until nobody can, or for so many steps."""
        while steps > 0:
            ranks = list(range(len(self.scripts)))
            draw.shuffle(ranks)
            if not any(self.begin(rank) or self.finish(rank, draw) for rank in ranks):
                return
            steps -= 1

    def mismatches(self) -> list[tuple[int, int]]:
        """(group, number) of unfinished collectives that ranks called differently."""
        found = set()
        for calls in self.begun:
            for each in calls:
                if each.op.is_collective and not each.is_done:
                    place = (each.op.group, each.number)
                    if self._is_mismatched(*place):
                        found.add(place)
        return sorted(found)

    def completes(self, rank: int, helpers: frozenset[object]) -> bool:
        """Whether what it waits for could end, if these ranks, and mismatches, did all to that."""
        call = self.current(rank)
        return call is None or self._can_end(rank, call, helpers)

    def _can_end(self, rank: int, call: Begun, helpers: frozenset[object] = frozenset()) -> bool:
        op = call.op
        if op.kind == "send":
            return op.peer in helpers or self._receives(op.peer, rank, op)
        if op.kind == "recv":
            others = [op.peer] if op.peer >= 0 else self.groups[op.group]
            helps = any(other in helpers for other in others if other != rank)
            return helps or bool(self._senders(rank, op))
        if self._is_mismatched(op.group, call.number) and ((op.group, call.number) not in helpers):
            return False
        needed = [other for other in self.groups[op.group] if other != rank]
        if op.kind in (FROM_ROOT, TO_ROOT) and rank != op.root:
            needed = [op.root]
        return all(
            other in helpers or (other not in self.frozen and self._made(other, op, call.number))
            for other in needed
        )

    def _made(self, rank: int, op: Op, number: int) -> bool:
        return any(
            each.op.is_collective
            and (each.op.group, each.number) == (op.group, number)
            and (each.is_done or self.state(rank) != "exit")
            for each in self.begun[rank]
        )

    def _is_mismatched(self, group: int, number: int) -> bool:
        kinds = {
            (each.op.kind, each.op.count, each.op.root)
            for calls in self.begun
            for each in calls
            if each.op.is_collective and each.op.group == group and each.number == number
        }
        return len(kinds) > 1

    def _senders(self, rank: int, op: Op) -> list[int]:
        return [
            other
            for other in self.groups[op.group]
            if other != rank
            and op.peer in (-1, other)
            and other not in self.frozen
            and (call := self.current(other)) is not None
            and (call.op.kind, call.op.peer, call.op.tag, call.op.group)
            == ("send", rank, op.tag, op.group)
        ]

    def _receives(self, rank: int, sender: int, op: Op) -> bool:
        call = self.current(rank)
        return (
            call is not None
            and rank not in self.frozen
            and (call.op.kind, call.op.tag, call.op.group) == ("recv", op.tag, op.group)
            and call.op.peer in (-1, sender)
        )


@dataclass(frozen=True)
class Truth:
    """roots: free ranks, and mismatches, that somebody needs. deadlocked: who can never go on."""

    roots: frozenset[object]
    deadlocked: frozenset[int]
    needs: dict[int, frozenset[object]]  # whom a blocked rank may need, itself

    def circles(self) -> list[tuple[int, ...]]:
        """All circles of ranks that are deadlocked, each from its smallest rank on."""
        found = []
        ranks = sorted(self.deadlocked)
        for length in range(2, len(ranks) + 1):
            for path in permutations(ranks, length):
                if path[0] == min(path) and all(
                    target in self.needs[rank]
                    for rank, target in zip(path, (*path[1:], path[0]), strict=True)
                ):
                    found.append(path)
        return found


def truth(toy: Toy) -> Truth:
    """Found out by trying all sets of those who might move."""
    agents: list[object] = [*range(len(toy.scripts)), *toy.mismatches()]
    blocked = [rank for rank in range(len(toy.scripts)) if toy.state(rank) == "blocked"]
    sets = [
        frozenset(agent for i, agent in enumerate(agents) if mask >> i & 1)
        for mask in range(1 << len(agents))
    ]
    goes = {rank: [toy.completes(rank, helpers) for helpers in sets] for rank in blocked}
    # It is of use to a rank, if some set is enough with it, and not without it.
    needs = {
        rank: frozenset(
            agent
            for i, agent in enumerate(agents)
            if any(
                goes[rank][mask | 1 << i] and not goes[rank][mask]
                for mask in range(1 << len(agents))
                if not mask >> i & 1
            )
        )
        for rank in blocked
    }
    everybody = (1 << len(agents)) - 1
    deadlocked: set[int] = set()
    for mask in range(1 << len(blocked)):
        members = [rank for i, rank in enumerate(blocked) if mask >> i & 1]
        outside = everybody
        for rank in members:
            outside &= ~(1 << rank)
        if not any(goes[rank][outside] for rank in members):
            deadlocked |= set(members)
    free = set(agents) - set(blocked)
    wanted = frozenset().union(*needs.values()) if needs else frozenset()
    return Truth(frozenset(free & wanted), frozenset(deadlocked), needs)


def healthy(draw: random.Random) -> Toy:
    """Ranks that would all come to the end of their scripts."""
    world = draw.randint(2, 5)
    groups = [tuple(range(world))]
    for _ in range(draw.randint(0, 2)):
        if world > 2:
            groups.append(tuple(sorted(draw.sample(range(world), draw.randint(2, world)))))
    scripts: list[list[Op]] = [[] for _ in range(world)]
    for _ in range(draw.randint(1, 5)):
        group = draw.randrange(len(groups))
        members = groups[group]
        if draw.random() < 0.5:
            kind = draw.choice([*SYMMETRIC, "all_reduce", FROM_ROOT, TO_ROOT])
            root = draw.choice(members) if kind in (FROM_ROOT, TO_ROOT) else -1
            op = Op(kind, group, root=root)
            for rank in members:
                aside = kind == "all_reduce" and draw.random() < 0.2
                scripts[rank].append(replace(op, in_background=aside))
        else:
            sender, receiver = draw.sample(members, 2)
            tag = draw.randrange(2)
            scripts[sender].append(Op("send", group, peer=receiver, tag=tag))
            scripts[receiver].append(Op("recv", group, peer=sender, tag=tag))
    return Toy(groups, scripts)


def broken(draw: random.Random) -> Toy:
    """The same, with one to three mistakes, or ranks that stop."""
    toy = healthy(draw)
    for script in toy.scripts:
        script[:] = [
            replace(op, peer=-1) if op.kind == "recv" and draw.random() < 0.3 else op
            for op in script
        ]
    for _ in range(draw.randint(1, 3)):
        rank = draw.randrange(len(toy.scripts))
        script = toy.scripts[rank]
        place = draw.randrange(len(script) + 1)
        what = draw.choice(
            ["sleep", "exit", "drop", "swap", "swap", "tag", "size", "any", "freeze"]
        )
        if what in ("sleep", "exit"):
            script.insert(place, Op(what))
        elif what == "freeze":
            toy.frozen.add(rank)
        elif place >= len(script):
            continue
        elif what == "drop":
            del script[place]
        elif what == "swap" and place:
            script[place - 1], script[place] = script[place], script[place - 1]
        elif what == "tag" and script[place].kind in ("send", "recv"):
            script[place] = replace(script[place], tag=2)
        elif what == "size" and script[place].kind == "all_reduce":
            script[place] = replace(script[place], count=9)
    return toy
