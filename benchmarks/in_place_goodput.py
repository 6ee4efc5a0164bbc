"""How much of a training is left when it is disturbed all the time; what survivors accumulate."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

from in_place_job import Job, Process
from in_place_recovery import SPARE_S, Case, one_host, trial

# A stopped process is a hang: the launcher looks for one after a second, and ends it.
HANG_FLAGS = ("--on-hang", "restart", "--hang-after", "1")
_EARLY = 20  # recoveries, after which memory has its size


def goodput(
    *, duration_s: float, every_s: float, step_s: float, stops: bool, chance: random.Random
) -> dict[str, object]:
    """4 ranks and a spare, and a fault after each `every_s`: steps beside those without faults."""
    worker = ["--step-s", str(step_s)]
    flags = HANG_FLAGS if stops else ()
    row: dict[str, object] = {"every_s": every_s, "step_ms": step_s * 1e3}
    calm_s = min(60.0, duration_s / 4)
    faults = {"killed": 0, "stopped": 0}
    with one_host(4, spares=1, worker=worker, flags=flags) as job:
        calm = _steps_in(job, calm_s) / calm_s
        first, begin = job.steps(), time.monotonic()
        for number in range(1, int(duration_s / every_s) + 1):
            time.sleep(max(0.0, begin + number * every_s - time.monotonic()))
            is_stop = stops and chance.random() < 0.5
            job.signal(_victim(job, chance), signal.SIGSTOP if is_stop else signal.SIGKILL)
            faults["stopped" if is_stop else "killed"] += 1
        time.sleep(max(0.0, begin + duration_s - time.monotonic()))
        took_s, done = time.monotonic() - begin, job.steps() - first
        calm_after = _steps_in(job, calm_s, patience_s=60.0) / calm_s
    possible = (calm + calm_after) / 2 * took_s
    row |= {"duration_s": took_s, **faults, "steps": done, "possible": possible}
    return {**row, "goodput": done / possible, "calm_drift": calm_after / calm}


def _steps_in(job: Job, duration_s: float, patience_s: float = 0.0) -> int:
    if patience_s:
        time.sleep(min(patience_s, 2 * SPARE_S))  # the last fault is over
    before = job.steps()
    time.sleep(duration_s)
    return job.steps() - before


def _victim(job: Job, chance: random.Random) -> Process:
    members = job.members()
    return chance.choice(sorted(members, key=lambda each: members[each].rank))


def leaks(recoveries: int, chance: random.Random) -> list[dict[str, object]]:
    """What three workers and the agent have after their first recoveries, and after all of them.

    Of the other two, the older one is killed: workers that die right after they joined are made to
    wait (rallypoint.rendezvous.job.gathering).
    """
    case, rows = Case("kill -9 of the second newest of 5"), []
    with one_host(5, spares=1) as job:
        elders, others = _oldest(job, [])[:3], _oldest(job, [])[3:]
        for number in range(1, recoveries + 1):

            def lose() -> tuple[float, list[Process]]:
                others[:] = [each for each in _oldest(job, others) if each not in elders]
                return job.signal(others[0]), [others[0]]

            if not trial(job, case, lose):
                break
            if number in (_EARLY, recoveries // 2, recoveries):
                pids = {"agent": job.agent, **{f"{each.pid}": each.pid for each in elders}}
                rows += [
                    {"recoveries": number, "process": name, **holdings(pid)}
                    for name, pid in pids.items()
                ]
            time.sleep(SPARE_S + chance.random() * 0.1)  # or the next loss finds no spare
    if case.stuck:
        print(f"stuck after {len(case.recoveries)} recoveries", file=sys.stderr)
    return rows


def _oldest(job: Job, known: list[Process]) -> list[Process]:
    """The members, those that are known first."""
    members = job.members()
    return [each for each in known if each in members] + sorted(members.keys() - set(known))


def holdings(pid: int) -> dict[str, object]:
    """What a process has."""
    root = Path("/proc") / str(pid)
    status = (root / "status").read_text()
    kib = {
        name: int(status.partition(f"{name}:")[2].split()[0])
        for name in ("RssAnon", "RssFile", "RssShmem")
    }
    return {
        "descriptors": len(list((root / "fd").iterdir())),
        "maps": len((root / "maps").read_text().splitlines()),
        "threads": len(list((root / "task").iterdir())),
        "own_kib": kib["RssAnon"] + kib["RssFile"],
        "shared_kib": kib["RssShmem"],  # of the group's region, what its calls have used
    }
