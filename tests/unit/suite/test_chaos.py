"""What a disturbed job must not do is found."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.chaos import CALM_S, PER_HOST, READ_S, BrokenPromiseError, History


class Job:
    """What its processes tell, as tests/system/in_place.py does."""

    def __init__(self, directory: Path) -> None:
        self.alive = {1, 2, 3}
        self.history = History(directory, lambda process: process in self.alive)
        self._directory = directory

    def tell(self, process: int, step: int, digest: str = "", *, after_s: float = 0.0) -> None:
        at_s = time.monotonic() + after_s
        with (self._directory / f"{process}.log").open("a") as file:
            file.write(f"{step} {digest or step} 0 3 {at_s:.6f} 1,2\n")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    for step in range(1, 6):
        for process in (1, 2):
            job.tell(process, step)
    job.history.read()
    return job


def test_a_sound_job(job: Job) -> None:
    job.alive = {2, 3}
    job.history.disturbed[1] = float("inf")
    job.tell(3, 6)
    job.tell(2, 6)
    job.history.read()
    assert job.history.newest == 6
    assert job.history.trained() == [2, 3]


def test_a_line_counts_once_it_is_whole(job: Job, tmp_path: Path) -> None:
    with (tmp_path / "2.log").open("a") as file:
        file.write("6 x")
    job.history.read()
    with (tmp_path / "2.log").open("a") as file:
        file.write(f"yz 0 3 {time.monotonic():.6f} \n")
    job.history.read()
    job.tell(1, 6, "xyz")
    job.history.read()
    assert job.history.newest == 6


def test_two_states_of_a_step(job: Job) -> None:
    job.tell(1, 6)
    job.tell(2, 6, "another")
    with pytest.raises(BrokenPromiseError, match="step 6 has two states"):
        job.history.read()


def test_a_step_is_done_twice(job: Job) -> None:
    job.tell(1, 5)
    with pytest.raises(BrokenPromiseError, match="1 does step 5 after 5"):
        job.history.read()


def test_a_newcomer_is_read_late(job: Job) -> None:
    """It began before what others did since was read."""
    job.tell(3, 3)
    job.tell(3, 6)
    job.history.read()
    assert job.history.newest == 6


def test_all_begin_anew(job: Job) -> None:
    job.tell(3, 1, after_s=READ_S + 1)
    with pytest.raises(BrokenPromiseError, match="3 begins with step 1 after 5"):
        job.history.read()


def test_what_a_stopped_process_tells_late(job: Job) -> None:
    process = 2 * PER_HOST + 1
    job.alive.add(process)
    job.history.late[2] = time.monotonic() + CALM_S
    job.tell(process, 3)
    job.history.read()
    job.history.disturbed[process] = time.monotonic()
    job.tell(process, 6, after_s=CALM_S + 1)
    job.history.read()
    assert not job.history.disturbed


def test_an_end_that_nobody_has_caused(job: Job) -> None:
    job.alive = {2, 3}
    with pytest.raises(BrokenPromiseError, match="1 has ended, and nobody has disturbed it"):
        job.history.read()


def test_the_end_of_one_that_began_as_its_host_was_disturbed(job: Job) -> None:
    process = 2 * PER_HOST + 1
    job.alive.add(process)
    job.tell(process, 6)
    job.history.read()
    job.history.late[2] = time.monotonic() + CALM_S
    job.alive.remove(process)
    job.history.read()
    assert process not in job.history.last
