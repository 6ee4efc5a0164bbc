"""How a group ends, by what happens to its workers."""

from __future__ import annotations

import pytest

from rallypoint.launch.worker_group import WorkerExit, WorkerGroup


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ("start 0 0 end", "succeeded"),
        ("start 0 0", "running"),  # what they have started may be
        ("start 0 end", "ended"),  # one could not be killed
        ("start 0 1 end", "failed"),
        ("start 1 stop 1 end", "failed"),
        ("start 1 stop 0 end", "failed"),
        ("start stop 0 1 end", "ended"),
        ("start 0 stop 0 end", "ended"),
        ("stop end", "ended"),
        ("0 0 end", "ended"),
    ],
)
def test_outcomes(events: str, outcome: str) -> None:
    group = WorkerGroup([4, 5])
    next_rank = iter([4, 5])
    for event in events.split():
        match event:
            case "start":
                group.started()
            case "stop":
                group.stopping()
            case "end":
                group.ended()
            case code:
                rank = next(next_rank)
                end = WorkerExit(rank=rank, local_rank=0, pid=1, time_s=0.0, code=int(code))
                assert group.exited(end) is group.exits[rank]
    assert group.succeeded is (outcome == "succeeded")
    assert group.has_failed is (outcome == "failed")


def test_the_end_of_a_worker_is_completed_by_what_the_group_knows() -> None:
    group = WorkerGroup([4, 5])
    group.started()
    group.killing(4, "it hangs")
    ends = [WorkerExit(rank=rank, local_rank=0, pid=1, time_s=0.0, signal=9) for rank in (4, 5)]
    assert group.exited(ends[0]).text == "rank 4 was killed by the launcher, as it hangs"
    group.stopping()
    assert [group.exited(each).by_launcher for each in ends] == [False, True]
    assert group.failures() == [group.exits[4]]
