"""Who is slow, told by counters alone: of jobs that are simulated call by call, with printed seeds.

The simulation knows who is slow because it made that rank so: it computes for longer. It knows
nothing of lateness, medians or thresholds; it only lets ranks arrive, and leave together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from rallypoint.base.recorded_call import GroupCounts, RecordedGroup
from rallypoint.diagnosis.stragglers import RankReading, is_open, lateness, slow_ranks

MS = 0.001


@dataclass
class Tally:
    """A rank's counters in one group."""

    members: tuple[int, ...]
    calls: int = 0
    transfers: int = 0
    waited_s: float = 0.0
    squared_s2: float = 0.0
    peers: set[int] = field(default_factory=set)
    arrived_s: float | None = None  # in the call that it is in

    def wait(self, wait_s: float) -> None:
        self.waited_s += wait_s
        self.squared_s2 += wait_s**2


class Job:
    """Ranks with clocks of their own, which meet in calls."""

    def __init__(self, ranks: int) -> None:
        self.at = [0.0] * ranks
        self.steps = [0] * ranks
        self.tallies: list[dict[str, Tally]] = [{} for _ in range(ranks)]

    def compute(self, rank: int, for_s: float) -> None:
        self.at[rank] += for_s

    def tally(self, rank: int, members: Sequence[int]) -> Tally:
        key = ",".join(map(str, members))
        return self.tallies[rank].setdefault(key, Tally(tuple(members)))

    def meet(self, members: Sequence[int], takes_s: float = 0.0) -> None:
        """A collective: nobody leaves before all have come."""
        last_s = max(self.at[rank] for rank in members)
        for rank in members:
            tally = self.tally(rank, members)
            tally.calls += 1
            if last_s > self.at[rank]:
                tally.wait(last_s - self.at[rank])
            self.at[rank] = last_s + takes_s

    def send(self, source: int, target: int, members: Sequence[int]) -> None:
        """The receiver waits for it."""
        for rank, other in ((source, target), (target, source)):
            tally = self.tally(rank, members)
            tally.transfers += 1
            tally.peers.add(members.index(other))
        if self.at[source] > self.at[target]:
            self.tally(target, members).wait(self.at[source] - self.at[target])
            self.at[target] = self.at[source]

    def read(self) -> dict[int, RankReading]:
        """All counters, when the last rank has come so far; the others wait until then."""
        now_s = max(self.at)
        readings = {}
        for rank, tallies in enumerate(self.tallies):
            groups = []
            for key, tally in tallies.items():
                counts = GroupCounts(
                    calls=tally.calls,
                    transfers=tally.transfers,
                    bytes=0,
                    waited_ns=round(tally.waited_s * 1e9),
                    waited_squared_ns2=round(tally.squared_s2 * 1e18),
                    peers=tuple(tally.peers),
                )
                groups.append(
                    RecordedGroup(
                        name=key, key=key, members=key, has_left=False, queued=0, calls=(),
                        transfers=(), counts=counts,
                    )
                )  # fmt: skip
            ahead_ns = rank % 3 * 3600 * 10**9  # each machine's clock has a beginning of its own
            readings[rank] = RankReading(
                now_ns=round(now_s * 1e9) + ahead_ns, groups=tuple(groups), step=self.steps[rank]
            )
        return readings


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def named(job: Job, steps: int, step: Callable[[], None]) -> list[int]:
    """Who is slow in so many steps, after some first ones."""
    for _ in range(3):
        step()
    first = job.read()
    for _ in range(steps):
        step()
    return [each.rank for each in slow_ranks(lateness(first, job.read()))]


@pytest.mark.parametrize("calls", [1, 7, 27, 121])
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_a_rank_that_sleeps_in_each_step_is_named(
    chance: random.Random, ranks: int, calls: int
) -> None:
    """30 ms of a step of 80 ms, for as long as `explain` looks at most."""
    job, slow = Job(ranks), chance.randrange(ranks)

    def step() -> None:
        for call in range(calls):
            for rank in range(ranks):
                job.compute(rank, 50 * MS / calls * chance.uniform(0.95, 1.05))
                if rank == slow and call == calls // 2:
                    job.compute(rank, 30 * MS)
            job.meet(range(ranks), 0.02 * MS)
        job.steps = [each + 1 for each in job.steps]

    for _ in range(3):
        step()
    first = job.read()
    for _ in range(21):
        step()
    late = lateness(first, job.read())
    (found,) = slow_ranks(late)
    assert found.rank == slow
    assert found.late_s_per_step == pytest.approx(30 * MS, rel=0.15)
    assert found.step_s == pytest.approx(80 * MS, rel=0.1)
    assert found.ranks == ranks


def test_five_milliseconds_are_found_within_a_hundred_steps(chance: random.Random) -> None:
    job, slow = Job(8), chance.randrange(8)

    def step() -> None:
        for rank in range(8):
            job.compute(rank, (80 + 5 * (rank == slow)) * MS * chance.gauss(1, 0.005))
        job.meet(range(8))
        job.steps = [each + 1 for each in job.steps]

    assert named(job, 100, step) == [slow]


def test_too_few_waits_leave_it_open(chance: random.Random) -> None:
    """Two steps are an accident, forty are not."""
    job = Job(8)

    def step() -> None:
        for rank in range(8):
            job.compute(rank, 50 * MS + 30 * MS * (rank == 3))
        job.meet(range(8))

    first = job.read()
    step()
    step()
    late = lateness(first, job.read())
    assert not slow_ranks(late)
    assert is_open(late)
    assert named(job, 40, step) == [3]


def test_one_long_pause_names_nobody(chance: random.Random) -> None:
    """Among many waits of usual length, for any rank."""
    job, paused = Job(8), chance.randrange(8)
    count = iter(range(1000))

    def step() -> None:
        pause_s = 2.0 if next(count) == 10 else 0.0
        for rank in range(8):
            job.compute(rank, 40 * MS * chance.gauss(1, 0.05) + pause_s * (rank == paused))
        job.meet(range(8))

    assert named(job, 40, step) == []


def test_who_waits_for_a_slow_rank_in_another_group_is_not_slow(chance: random.Random) -> None:
    """Tensor parallel pairs within data parallel groups: its partner comes late there, too."""
    job, slow = Job(8), chance.randrange(8)
    pairs = [(rank, rank + 1) for rank in range(0, 8, 2)]
    replicas = [tuple(range(first, 8, 2)) for first in range(2)]

    def step() -> None:
        for _ in range(5):
            for rank in range(8):
                job.compute(rank, (10 + 4 * (rank == slow)) * MS * chance.gauss(1, 0.01))
            for pair in pairs:
                job.meet(pair)
        for group in replicas:
            job.meet(group)

    assert named(job, 20, step) == [slow]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_stages_of_a_pipeline_wait_unequally(chance: random.Random, replicas: int) -> None:
    """The last stage computes for longer, on purpose; only a rank that is slower than its like in
    another replica is slow. All meet once in a step, for the norm of the gradients.
    """
    stages = 4
    ranks = range(stages * replicas)
    slow: list[int] = []
    job = Job(len(ranks))

    def step() -> None:
        for replica in range(replicas):
            line = ranks[replica * stages : (replica + 1) * stages]
            for _ in range(4):
                for stage, rank in enumerate(line):
                    by = 1.5 if stage == stages - 1 else 1.0
                    extra_s = 8 * MS if rank in slow else 0.0
                    job.compute(rank, 10 * MS * by * chance.gauss(1, 0.02) + extra_s)
                    if stage < stages - 1:
                        job.send(rank, line[stage + 1], line)
        for stage in range(stages):
            if replicas > 1:
                job.meet(ranks[stage::stages])
        job.meet(ranks)

    assert named(job, 30, step) == []
    slow.append(1)
    assert named(job, 30, step) == ([1] if replicas > 1 else [])


def test_a_handshake_at_the_start_makes_no_pipeline() -> None:
    job = Job(4)
    job.send(0, 1, range(4))
    job.meet(range(4))

    def step() -> None:
        for rank in range(4):
            job.compute(rank, 50 * MS + 30 * MS * (rank == 2))
        job.meet(range(4))

    assert named(job, 20, step) == [2]


def test_calls_whose_waits_are_not_counted_leave_all_unknown() -> None:
    job = Job(4)
    first = job.read()
    for _ in range(30):
        job.compute(2, 30 * MS)
        job.meet(range(4))
    second = job.read()
    assert slow_ranks(lateness(first, second))
    (counted,) = second[1].groups
    other = counted.__replace__(key="of an older version", counts=None)
    second[1] = RankReading(now_ns=second[1].now_ns, groups=(counted, other))
    assert lateness(first, second) == {}


def named_in_a_healthy_job(chance: random.Random) -> list[int]:
    """A job of any shape in which the ranks take turns at being late, or are late by little."""
    ranks = chance.choice((2, 3, 4, 8, 16))
    job, steps = Job(ranks), chance.choice((3, 6, 21, 100))
    step_s = 10 ** chance.uniform(-3, 0.3)
    calls = chance.choice((1, 2, 7, 27))
    noise = chance.choice((0.0, 0.02, 0.1, 0.3))
    pauses = chance.choice((0.0, 0.0, 0.01, 0.1))  # of the steps of a rank
    own = [chance.gauss(1, 0.01) for _ in range(ranks)]  # no two machines are alike
    halves = [tuple(range(first, ranks, 2)) for first in range(2)] if ranks > 3 else []
    knows_steps = chance.random() < 0.5
    rests = [0.0] * ranks  # a rank that is busy stays so for some steps

    def step() -> None:
        for rank in range(ranks):
            rests[rank] = 0.7 * rests[rank] + chance.gauss(0, 0.1 * noise)
        for _ in range(calls):
            for rank in range(ranks):
                by = own[rank] * max(0.2, 1 + rests[rank] + chance.gauss(0, noise))
                job.compute(rank, step_s / calls * by)
            for half in halves:
                job.meet(half, step_s / calls * 0.1)
        for rank in range(ranks):
            if chance.random() < pauses:
                job.compute(rank, step_s * chance.uniform(1, 20))
        job.meet(range(ranks), step_s * 0.1)
        if knows_steps:
            job.steps = [each + 1 for each in job.steps]

    return named(job, steps, step)


def test_nobody_is_named_in_healthy_jobs(chance: random.Random) -> None:
    assert [named_in_a_healthy_job(chance) for _ in range(200)] == [[]] * 200
