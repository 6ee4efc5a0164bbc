"""Which rank keeps the others waiting in each step: the one that waits least itself.

Two readings of all ranks' counters go in, at any distance; what was done in between counts. Clocks
of machines are not compared, calls are not matched, and no period is guessed.

    rank 0  |..compute..|---waits---|..compute..|---waits---|     waited 62 ms
    rank 1  |..compute..|---waits---|..compute..|---waits---|     waited 62 ms
    rank 2  |..compute.......load..||..compute.......load..||     waited  2 ms: 60 ms late

What a rank waited counts over all its groups: who waits in one group for a slow rank comes late to
another, and is not slow. Ranks are compared within a group. Those that send to each other do
different work, as stages of a pipeline, where unequal waits are usual: they are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log, sqrt
from statistics import median

from rallypoint.base.recorded_call import GroupCounts, RecordedGroup, current_groups
from rallypoint.diagnosis.facts import Facts

# Never name anybody in a healthy job, in which ranks take turns at being last. So a rank is slow
# only if all of these hold:
# - relative: its lateness is a share of the time that is worth a person's time. That may be small
#   if it is made of many waits; a few say little about the next ones.
# - absolute: the others wait for a millisecond at a time. Less is the scheduler's noise, and a loop
#   of tiny calls consists of it.
# - it is no accident: if each of N alike waits were for any of n ranks, all N of them would be for
#   the same one with the probability n^(1-N). N counts the waits as if they were equally long: one
#   long pause of a rank (a checkpoint, garbage) is one, however many short waits there are. All
#   waits of a step count as one, as its calls have the same reason to be late (a longer sentence);
#   where steps are not known, a greater share must make up for that.
_LEAST_SHARE, _SHARE_OF_ONE, _SHARE_WITHOUT_STEPS = 0.05, 0.5, 0.15
_LEAST_WAIT_S = 0.001
_ACCIDENT = 1e-4
_LEAST_WAITS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """A rank's counters at one moment.

    Attributes:
        now_ns: the moment, by the monotonic clock of its machine.
        groups: as `read_counts` has them.
        step: its step, as RecordedSteps; None if not known.
    """

    now_ns: int
    groups: tuple[RecordedGroup, ...]
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """By how much a rank came later than others, between two readings.

    Attributes:
        late_s: in all: for how much longer the others waited (their median). Negative: it waited
            for longer than they.
        interval_s: the time between the readings.
        waits: of how many equally long waits that consists; they are `wait_s` long on average.
        ranks: how many ranks were compared.
        steps: how many steps there were; 0 if not known.
        calls: how many collectives of the group in which they were compared.
    """

    rank: int
    late_s: float
    interval_s: float
    waits: float
    wait_s: float
    ranks: int
    steps: int
    calls: int

    @property
    def share(self) -> float:
        """Of the time; at most 1."""
        return min(1.0, self.late_s / self.interval_s) if self.interval_s > 0 else 0.0

    @property
    def late_s_per_step(self) -> float:
        """Of a step; if steps are not known, of a collective."""
        return self.share * self.interval_s / max(1, self.steps or self.calls)

    @property
    def step_s(self) -> float | None:
        """How long a step took on average; None if steps are not known."""
        return self.interval_s / self.steps if self.steps else None

    @property
    def is_worth_a_look(self) -> bool:
        """Whether the rank is slow, or may turn out to be after more waits."""
        return self.late_s > 0 and self.wait_s >= _LEAST_WAIT_S and self.share >= _LEAST_SHARE

    @property
    def is_slow(self) -> bool:
        """Whether the others wait for this rank again and again."""
        needed = max(_LEAST_WAITS, 1 - log(_ACCIDENT) / log(self.ranks))
        least = _LEAST_SHARE if self.steps else _SHARE_WITHOUT_STEPS
        waits = min(self.waits, self.steps or self.calls)
        share = max(least, _SHARE_OF_ONE / sqrt(max(1.0, waits)))
        return self.is_worth_a_look and waits >= needed and self.share >= share


def readings(facts: Facts) -> dict[int, RankReading]:
    """The counters of all ranks that are alive, by rank."""
    return {
        worker.rank: RankReading(
            now_ns=node.now_ns,
            groups=worker.groups,
            step=worker.steps.step if worker.steps else None,
        )
        for node in facts.nodes
        for worker in node.workers
        if worker.process is not None and worker.end is None
    }


def begun(facts: Facts) -> dict[int, RankReading]:
    """The counters when these processes began: no call had been made."""
    return {
        worker.rank: RankReading(now_ns=node.now_ns - round(worker.process.age_s * 1e9), groups=())
        for node in facts.nodes
        for worker in node.workers
        if worker.process is not None and worker.end is None
    }


def waited_s(reading: RankReading) -> float:
    """For how long a rank has waited for others in all, so far."""
    counted = (group.counts for group in reading.groups if group.counts is not None)
    return sum(_waited_s(counts, reading.now_ns) for counts in counted)


def lateness(
    first: Mapping[int, RankReading], second: Mapping[int, RankReading]
) -> dict[int, Lateness]:
    """By rank, its greatest lateness among the groups in which it can be compared.

    Args:
        first, second: the same processes, by global rank. After ranks were lost or have joined, a
            rank may be another process: compare only readings of the same round.
    """
    waits = {rank: _Waits.between(first[rank], second[rank]) for rank in first.keys() & second}
    if any(each.is_unknown for each in waits.values()):
        return {}
    found: dict[int, Lateness] = {}
    for key, ranks in _comparable(waits, second).items():
        for rank in ranks:
            late = _late(rank, [waits[each] for each in ranks if each != rank], waits[rank], key)
            if rank not in found or late.late_s > found[rank].late_s:
                found[rank] = late
    return found


def slow_ranks(late: Mapping[int, Lateness]) -> list[Lateness]:
    """Those that keep the others waiting, the worst first."""
    return sorted((each for each in late.values() if each.is_slow), key=lambda each: -each.late_s)


def is_open(late: Mapping[int, Lateness]) -> bool:
    """Whether nobody is slow so far, but some rank may be: there were too few waits to tell."""
    return not slow_ranks(late) and any(each.is_worth_a_look for each in late.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waits:
    """What a rank did between the readings.

    Attributes:
        squared_s2: the sum of the squares of its waits.
        calls: collectives, by group.
        partners: the global ranks with which it exchanged messages; as far as known.
        is_unknown: it was in calls whose waits are not counted.
    """

    waited_s: float
    squared_s2: float
    interval_s: float
    steps: int
    calls: Mapping[str, int]
    partners: frozenset[int]
    is_unknown: bool

    @classmethod
    def between(cls, first: RankReading, second: RankReading) -> _Waits:
        before = {group.key: group for group in current_groups(first.groups)}
        waited = squared = 0.0
        calls: dict[str, int] = {}
        partners: set[int] = set()
        is_unknown = False
        for group in current_groups(second.groups):
            counts, earlier = group.counts, before.get(group.key)
            if counts is None:
                is_unknown |= not group.has_left
                continue
            then = earlier.counts if earlier else None
            if then is None or then.calls > counts.calls:  # a group formed anew
                then = _NOTHING
            waited += _waited_s(counts, second.now_ns) - _waited_s(then, first.now_ns)
            squared += _squared_s2(counts, second.now_ns) - then.waited_squared_ns2 / 1e18
            calls[group.key] = calls.get(group.key, 0) + counts.calls - then.calls
            if counts.transfers > then.transfers:
                partners.update(_partners(group, counts))
        steps = 0 if second.step is None or first.step is None else second.step - first.step
        return cls(
            waited_s=max(0.0, waited),
            squared_s2=max(0.0, squared),
            interval_s=(second.now_ns - first.now_ns) / 1e9,
            steps=max(0, steps),
            calls=calls,
            partners=frozenset(partners),
            is_unknown=is_unknown,
        )


_NOTHING = GroupCounts(calls=0, transfers=0, bytes=0, waited_ns=0, waited_squared_ns2=0)


def _waited_s(counts: GroupCounts, now_ns: int) -> float:
    return (counts.waited_ns + _running_ns(counts, now_ns)) / 1e9


def _squared_s2(counts: GroupCounts, now_ns: int) -> float:
    return counts.waited_squared_ns2 / 1e18 + (_running_ns(counts, now_ns) / 1e9) ** 2


def _running_ns(counts: GroupCounts, now_ns: int) -> int:
    """How long the present call has lasted: what it has waited is not counted yet."""
    return max(0, now_ns - counts.running_since_ns) if counts.running_since_ns else 0


def _comparable(
    waits: Mapping[int, _Waits], second: Mapping[int, RankReading]
) -> dict[str, tuple[int, ...]]:
    """The groups in which ranks do the same work, by key: their ranks."""
    found: dict[str, set[int]] = {}
    different: set[str] = set()
    for rank in waits:
        for group in second[rank].groups:
            if waits[rank].calls.get(group.key) and not group.has_left:
                found.setdefault(group.key, set()).add(rank)
    for rank, each in waits.items():
        partners = each.partners - {rank}
        different |= {key for key, ranks in found.items() if rank in ranks and partners & ranks}
    return {
        key: tuple(sorted(ranks))
        for key, ranks in found.items()
        if len(ranks) > 1 and key not in different
    }


def _partners(group: RecordedGroup, counts: GroupCounts) -> Iterator[int]:
    for peer in counts.peers:
        rank = group.global_rank(peer)
        yield from group.ranks if rank is None else (rank,)


def _late(rank: int, others: list[_Waits], own: _Waits, key: str) -> Lateness:
    shares = [each.waited_s / each.interval_s for each in others if each.interval_s > 0]
    own_share = own.waited_s / own.interval_s if own.interval_s > 0 else 0.0
    late_s = (median(shares or [own_share]) - own_share) * own.interval_s
    squared = median(each.squared_s2 for each in others)
    waited = median(each.waited_s for each in others)
    return Lateness(
        rank=rank,
        late_s=late_s,
        interval_s=own.interval_s,
        waits=late_s**2 / squared if squared > 0 else 0.0,
        wait_s=squared / waited if waited > 0 else 0.0,
        ranks=len(others) + 1,
        steps=max(each.steps for each in (own, *others)),  # a single rank may tell them
        calls=own.calls[key],
    )
