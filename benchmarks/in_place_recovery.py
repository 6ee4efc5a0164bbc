"""How long the ranks that outlive a loss stand still: kinds of loss, with trials of each."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from in_place_job import PARTS, Job, Process, Recovery, RestartedError, StuckError

from hosts import Hosts

WORKER = str(Path(__file__).with_name("in_place_worker.py"))
# What `cable` sets, so that a host that says nothing is given up after a second.
SHORT_SILENCE = "keep_alive_interval=.2,keep_alive_max_attempt=5"
_SETTLE_S = 0.5
SPARE_S = 2.0  # until a new spare waits for a place
# After four changes within five minutes new ranks have to wait, longer each time
# (rallypoint.rendezvous.job.gathering); a host that is lost and comes again makes two.
KILLS_PER_JOB, HOSTS_PER_JOB = 4, 2


@dataclass(slots=True)
class Case:
    """Trials of one kind of loss.

    Attributes:
        restarted: how often it went on with new processes only.
        stuck: how often it did not go on, and why.
    """

    name: str
    recoveries: list[Recovery] = field(default_factory=list)
    restarted: int = 0
    stuck: list[str] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        """Its figures, in milliseconds."""
        row: dict[str, object] = {"case": self.name, "trials": len(self.recoveries)}
        row["restarted"] = self.restarted
        row["stuck"] = len(self.stuck)
        row["moved"] = sum(not each.is_in_place for each in self.recoveries)
        row |= spread([each.went_on_s for each in self.recoveries], "")
        before = 0.0
        for what in PARTS:
            times = [each.parts[what] for each in self.recoveries if what in each.parts]
            reached = statistics.median(times) * 1e3 if times else before
            row[what] = reached - before
            before = reached
        whole = [each.whole_s for each in self.recoveries if each.whole_s is not None]
        return row | spread(whole, "whole_")


def spread(times: Sequence[float], prefix: str) -> dict[str, object]:
    """Median, 95th percentile and worst, in milliseconds; None: there are none."""
    names = [f"{prefix}{name}" for name in ("median_ms", "p95_ms", "worst_ms")]
    if not times:
        return dict.fromkeys(names)
    ordered = sorted(each * 1e3 for each in times)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return dict(zip(names, (statistics.median(ordered), p95, ordered[-1]), strict=True))


def command(*flags: str) -> list[str]:
    """An agent's command line."""
    return [sys.executable, "-m", "rallypoint", "run", "--max-restarts", "1000000", *flags, WORKER]


def in_jobs(trials: int, each: int) -> list[int]:
    """So many trials, in jobs of at most so many: the trials of each job."""
    return [min(each, trials - begin) for begin in range(0, trials, each)]


@contextmanager
def one_host(
    size: int, *, spares: int = 0, worker: Sequence[str] = (), flags: Sequence[str] = ()
) -> Iterator[Job]:
    """A job of one agent, here, in which all ranks have begun to train."""
    own = ["--nproc-per-node", str(size), "--spares", str(spares)]
    with Job(command(*own, *flags), size, worker=worker) as job:
        job.start()
        job.await_size(0.0, size)
        time.sleep(SPARE_S if spares else _SETTLE_S)
        yield job


@contextmanager
def three_hosts(
    *, spares: int = 0, conf: str = "", worker: Sequence[str] = ()
) -> Iterator[tuple[Job, Hosts]]:
    """A job of two ranks on each of three test hosts; that with the endpoint is host 1."""
    flags = ["--nnodes", "2:3", "--nproc-per-node", "2", "--spares", str(spares)]
    flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host1:29400", "--rdzv-id", "j"]
    if conf:
        flags += ["--rdzv-conf", conf]
    with Hosts(3) as hosts, Job(command(*flags), 6, worker=worker, hosts=hosts) as job:
        for number in (1, 2, 3):
            job.start(number)
        job.await_size(0.0, 6)
        time.sleep(SPARE_S if spares else _SETTLE_S)
        yield job, hosts


def kill_workers(
    job: Job,
    case: Case,
    trials: int,
    chance: random.Random,
    *,
    rank: int | None = None,
    pause_s: float = _SETTLE_S,
) -> None:
    """Kill one worker after the other, of that rank only, each once the job is whole again."""

    def lose() -> tuple[float, list[Process]]:
        members = job.members()
        ranked = sorted(members, key=lambda each: members[each].rank)
        victim = chance.choice(ranked) if rank is None else ranked[rank]
        return job.signal(victim), [victim]

    for _ in range(trials):
        if not trial(job, case, lose):
            return
        time.sleep(pause_s + chance.random() * 0.1)


def kill_hosts(job: Job, case: Case, trials: int, chance: random.Random) -> None:
    """Kill all that a job has on a host, and start its agent again."""
    for _ in range(trials):
        number = chance.randrange(1, 4)

        def lose(number: int = number) -> tuple[float, list[Process]]:
            lost = [each for each in job.members() if each.host == f"host{number}"]
            return job.kill_host(number), lost

        if not trial(job, case, lose, whole=False):
            return
        since = time.monotonic()
        job.start(number)
        try:
            job.await_size(since, job.size)
        except StuckError as error:
            case.stuck.append(f"host {number} did not join again: {error}")
            print(f"{case.name}: {case.stuck[-1]}", file=sys.stderr)
            return
        time.sleep(_SETTLE_S + chance.random() * 0.1)


def pull_cable(job: Job, hosts: Hosts, case: Case, number: int, chance: random.Random) -> bool:
    """Cut off a host, which nobody is told, and connect it again; returns whether all go on."""

    def lose() -> tuple[float, list[Process]]:
        lost = [each for each in job.members() if each.host == f"host{number}"]
        since = time.monotonic()
        hosts.pull_cable(number)
        return since, lost

    if not trial(job, case, lose, whole=False):
        return False
    since = time.monotonic()
    hosts.plug_cable(number)
    try:
        job.await_size(since, job.size, 120.0)
    except StuckError as error:
        case.stuck.append(f"host {number} did not join again: {error}")
        print(f"{case.name}: {case.stuck[-1]}", file=sys.stderr)
        return False
    time.sleep(_SETTLE_S + chance.random())
    return True


def trial(
    job: Job,
    case: Case,
    lose: Callable[[], tuple[float, list[Process]]],
    *,
    whole: bool = True,
) -> bool:
    """One loss; returns whether the job goes on."""
    try:
        since, lost = lose()
        case.recoveries.append(job.recovery(since, lost, whole=whole))
    except RestartedError as error:
        case.restarted += 1
        print(f"{case.name}: {error}", file=sys.stderr)
    except StuckError as error:
        case.stuck.append(str(error))
        print(f"{case.name}, trial {len(case.recoveries)}: {error}", file=sys.stderr)
        return False
    else:
        job.forget(lost)
    return True
