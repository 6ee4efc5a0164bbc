"""The journal of a job's events, as programs read it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rallypoint.base.errors import HostError
from rallypoint.launch.job import Job
from rallypoint.launch.output.journal import Journal, _note_of_gap


def job(path: Path | str, *, prints: bool = False) -> Job:
    return Job(
        command=("x",),
        local_world_size=1,
        run_id="job7",
        host="h",
        environ={},
        events_file=str(path),
        prints_events=prints,
    )


def test_an_event_is_a_line_of_json(tmp_path: Path) -> None:
    """Of several agents, too: each adds to the file."""
    path = tmp_path / "events"
    before = time.time()
    for rank in (0, 1):
        journal = Journal(job(path))
        journal.node_rank = rank
        journal.record("round", {"round": 3, "why": "a\nb"})
        journal.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(before <= line.pop("time") <= time.time() for line in lines)
    expected = {"event": "round", "run_id": "job7", "round": 3, "why": "a\nb"}
    assert lines == [{**expected, "node_rank": rank} for rank in (0, 1)]


def test_it_can_be_printed(capfd: pytest.CaptureFixture[str]) -> None:
    journal = Journal(job("", prints=True))
    journal.record("end", {"status": 0})
    journal.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["status"] == 0


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(HostError) as raised:
        Journal(job(tmp_path / "none" / "events"))
    assert str(raised.value) == (
        f"cannot open {tmp_path}/none/events: No such file or directory; give another file with "
        "--json-events."
    )


def test_a_full_disk_is_told_once_and_ends_no_job(capfd: pytest.CaptureFixture[str]) -> None:
    journal = Journal(job("/dev/full"))
    for number in range(3):
        journal.record("round", {"round": number})
    journal.close()
    told = "cannot write /dev/full: No space left on device; the job continues, but further events"
    assert capfd.readouterr().err.count(told) == 1


def test_events_that_were_lost_are_counted() -> None:
    found = json.loads(_note_of_gap(70))
    assert (found["event"], found["bytes"]) == ("lost", 70)
