"""When commands that watch a job inspect it, and what they say of launchers that are too old."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.unit.diagnosis.followed_job import FollowedJob

from rallypoint.base.errors import HostError
from rallypoint.cli import watching
from rallypoint.cli.jobs import RunningJob
from rallypoint.cli.watching import Inspections, follow_job
from rallypoint.diagnosis.explanation import Explanation, Verdict
from rallypoint.diagnosis.job_view import Inspection, JobView, view_of


def view(at_s: float) -> JobView:
    found = view_of(FollowedJob(stuck=(1, 30.0)).history(at_s))
    assert found is not None
    return found


def due(inspections: Inspections, first_s: int, last_s: int) -> list[int]:
    """The seconds at which an inspection begins, while the job makes no progress."""
    stalled = view(40.0)
    return [now for now in range(first_s, last_s) if inspections.is_due(stalled, now)]


def test_a_job_is_inspected_only_while_it_makes_no_progress() -> None:
    inspections = Inspections()
    assert not inspections.is_due(view(20.0), 100)
    assert due(inspections, 101, 120) == [101, 106, 111, 116]
    hang = Inspection(Explanation(kind=Verdict.EXPLAINED, sentence="why"), {})
    inspections.add(hang)
    assert inspections.latest is hang
    assert not inspections.is_due(view(20.0), 120)
    assert inspections.latest is None
    assert due(inspections, 121, 122) == [121]  # at once


def test_a_job_that_computes_is_inspected_more_and_more_rarely() -> None:
    inspections, times, now = Inspections(), [], 0
    no_hang = Inspection(Explanation(kind=Verdict.NO_HANG, sentence=""), {})
    for _ in range(6):
        while not due(inspections, now, now + 1):
            now += 1
        times.append(now)
        inspections.add(no_hang)
    # The result of the first counts from the second on.
    assert [b - a for a, b in pairwise(times)] == [5, 10, 20, 40, 60]


@pytest.mark.parametrize("said", ["the agent does not know that request", "no agent answers"])
def test_an_old_launcher_is_named(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    def refuse(*_: object) -> None:
        raise HostError(said)

    monkeypatch.setattr(watching, "follow", refuse)
    job = object.__new__(RunningJob)
    job.agents = ()
    expected = "older than this rallypoint" if "know" in said else said
    with pytest.raises(HostError, match=expected):
        list(follow_job(job))
