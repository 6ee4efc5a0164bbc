"""What is kept of jobs that have ended: its size, who may read it, and files that are invalid."""

from __future__ import annotations

import json
import os
import random
import stat
from itertools import pairwise
from pathlib import Path

import pytest

from rallypoint.base.job_so_far import Durations, JobEvent, JobSoFar
from rallypoint.base.recorded_steps import MOST_LOGGED, RecordedSteps
from rallypoint.base.trained_time import TrainedTime
from rallypoint.launch.inspection import ended_job
from rallypoint.launch.inspection.ended_job import (
    EndedJob,
    RankEnd,
    ended_jobs,
    latest_ended,
    without_values,
    write,
)
from rallypoint.launch.output.progress import JobEvents

HOSTILE = ('a"b\\', "a\nb\r\x1b]0;x\x07", "\u202etxt\u2028", "\udcff", "</script>", "é" * 300, "")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "rallypoint"


def job(ended: float = 1.8e9, run_id: str = "try", **fields: object) -> EndedJob:
    usual: dict[str, object] = {
        "run_id": run_id,
        "pid": 7,
        "host": "here",
        "node_rank": 0,
        "command": ("python", "-u", "/home/me/train.py"),
        "ended": ended,
        "uptime_s": 60.0,
        "status": 0,
        "text": "",
        "round": 0,
        "nodes": 1,
        "world_size": 2,
        "step": 40,
        "total": None,
        "ranks": (RankEnd(rank=0, pid=8, end="ended with 0"),),
    }
    return EndedJob(**{**usual, **fields})  # type: ignore[arg-type]


def test_what_is_written_is_read() -> None:
    for number, text in enumerate(HOSTILE):
        so_far = JobSoFar(
            events=(JobEvent(at=1.5, kind="loss", text=text, lost_s=0.25),),
            losses={"killed": 2},
            restarts=1,
            recoveries={"all": Durations().with_one(0.3)},
            trained=TrainedTime(trained_s=1 / 3, steps=7),
        )
        given = job(1.8e9 + number, run_id=text, text=text, so_far=so_far)
        write(given, [(1.5, 1), (2.25, 2)])
        found = latest_ended("")
        assert found == (given, [(1.5, 1), (2.25, 2)])


def test_it_is_json_that_only_its_user_reads(kept: Path) -> None:
    old = os.umask(0)
    try:
        write(job(text=HOSTILE[1]), [])
    finally:
        os.umask(old)
    (path,) = kept.iterdir()
    assert path.name == "7.1800000000.history.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    for line in path.read_text().splitlines():
        assert isinstance(json.loads(line), dict)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python -u train.py --api-key hunter2 --lr=0.1 -v hunter2 hunter2",
         "python -u train.py --api-key ... --lr=... -v ..."),
        ("python -u -m trainer.main hunter2 --token=hunter2",
         "python -u -m trainer.main ... --token=..."),
        ("python -u -c TEXT run.py hunter2", "python -u -c TEXT run.py ..."),
        ("./serve -- hunter2 -", "./serve ..."),
        ("./serve", "./serve"),
        ("python -u", "python -u"),
    ],
)  # fmt: skip
def test_values_of_arguments_are_left_out(command: str, shown: str, kept: Path) -> None:
    assert " ".join(without_values(command.split())) == shown
    write(job(command=tuple(command.split())), [])
    assert all("hunter2" not in each.read_text() for each in kept.iterdir())


def test_a_job_of_thirty_days(kept: Path) -> None:
    """A loss every ten minutes, after which ranks continue, or else restart; steps of 0.8 s."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance, events, now_s, step = random.Random(seed), JobEvents(), 0.0, 0
    log: list[tuple[float, int]] = []
    stride = 1
    while now_s < 30 * 86400:
        if chance.random() < 0.5 and log:
            events.restarted()
            log, stride = [], 1
        elif log:
            events.interrupted()
        for _ in range(700):
            now_s, step = now_s + 0.8, step + 1
            if step % stride == 0:
                log.append((now_s, step))
            if len(log) > MOST_LOGGED:
                log, stride = log[::2], 2 * stride
        ended_s, now_s = now_s, now_s + 40
        events.add("loss", chance.choice(HOSTILE) * 100, 1.0)
        events.lost(chance.choice(("killed", "raised")))
        events.recovered({f"{part}_s": 0.1 for part in ("detect", "agree", "form", "sync")}, 0.4)
        events.count(
            RecordedSteps(
                step=step, total=None, at_ns=int(ended_s * 1e9), source="program", log=tuple(log)
            )
        )
    so_far = events.so_far()
    ranks = tuple(RankEnd(rank=rank, pid=rank, end="killed by SIGKILL") for rank in range(1024))
    command = ("python", "-u", "train.py", *("--flag=x" * 100,) * 1000)
    write(
        job(so_far=so_far, ranks=ranks, text="x" * 10**6, command=command, uptime_s=now_s),
        events.samples,
    )
    (path,) = kept.iterdir()
    assert path.stat().st_size <= 256 << 10
    found = latest_ended("try")
    assert found is not None
    assert found[0].so_far.events
    assert found[0].so_far.events == so_far.events[-len(found[0].so_far.events) :]
    assert found[0].so_far.loss_count > 4000
    trained = found[0].so_far.trained_share(now_s)
    assert trained == pytest.approx(560 / 600, rel=0.01)
    times = [time_s for time_s, _ in found[1]]
    assert times == sorted(times)
    assert 250 < len(times) <= 1000
    assert times[0] < 0.01 * now_s
    assert times[-1] > 0.99 * now_s
    assert max(later - each for each, later in pairwise(times)) < 0.01 * now_s


def test_the_newest_hundred_stay_and_twenty_megabytes(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(103):
        write(job(1.8e9 + number), [])
        os.utime(kept / f"7.{1_800_000_000 + number}.history.jsonl", (number, number))
    (kept / "7.1.json").write_text("{}")  # of saved_job.py
    assert sorted(each.ended - 1.8e9 for each in ended_jobs()) == list(range(3, 103))
    size = (kept / "7.1800000050.history.jsonl").stat().st_size
    monkeypatch.setattr(ended_job, "MOST_BYTES_IN_ALL", 10 * size)
    write(job(1.8e9 + 103), [])
    assert [each.ended - 1.8e9 for each in ended_jobs()] == [*range(103, 93, -1)]
    assert (kept / "7.1.json").exists()


def test_no_place_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    with pytest.raises(OSError, match="Not a directory"):
        write(job(), [])
    assert list(ended_jobs()) == []
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(OSError, match="relative"):
        write(job(), [])
    assert latest_ended("try") is None


def test_a_full_disk_leaves_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.mkdir(parents=True)

    def is_full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", is_full)
    with pytest.raises(OSError, match="No space"):
        write(job(), [])
    assert list(kept.iterdir()) == []


def test_files_of_others_are_passed_over(kept: Path, tmp_path: Path) -> None:
    write(job(), [])
    good = (kept / "7.1800000000.history.jsonl").read_text()
    bad = [
        "", "{", "[]", "null", "[" * 100_000, good.replace('"pid":7', '"pid":"7"'),
        good.replace('"pid":7', '"pid":7,"more":1'), '{"job":{}}', "\0" * 1000, "x" * 10**6,
    ]  # fmt: skip
    for number, text in enumerate(bad):
        (kept / f"{number}.1.history.jsonl").write_text(text)
    os.mkfifo(kept / "50.1.history.jsonl")
    (kept / "51.1.history.jsonl").mkdir()
    (tmp_path / "elsewhere").write_text(good)
    (kept / "52.1.history.jsonl").symlink_to(tmp_path / "elsewhere")
    (kept / "53.1.history.jsonl").symlink_to("/dev/zero")
    assert [each.pid for each in ended_jobs()] == [7]


def test_bad_lines_after_a_good_one(kept: Path) -> None:
    write(job(), [(1.0, 1)])
    path = kept / "7.1800000000.history.jsonl"
    for line in ('{"event":{"at":"now"}}', '{"steps":[["a",1]]}', '{"steps":7}', "[]", "7", "{"):
        path.write_text(path.read_text().splitlines()[0] + f"\n{line}\n")
        found = latest_ended("try")
        assert found is not None
        assert (found[0].pid, found[1]) == (7, [])


def test_jobs_are_chosen_as_running_ones() -> None:
    for number, name in enumerate(("one", "two", "one", "three")):
        write(job(1.8e9 + number, run_id=name, pid=number + 7), [])
    latest = {word: latest_ended(word) for word in ("", "one", "t", "8", "four")}
    pids = {word: found[0].pid if found else None for word, found in latest.items()}
    assert pids == {"": 10, "one": 9, "t": 10, "8": 8, "four": None}


def test_only_the_last_events_are_remembered() -> None:
    events = JobEvents()
    for number in range(1000):
        events.add("round", f"round {number}")
    texts = [each.text for each in events.so_far().events]
    assert texts == [f"round {number}" for number in range(488, 1000)]
    assert [each.text for each in events.so_far(2).events] == ["round 998", "round 999"]
