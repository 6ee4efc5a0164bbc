"""The states of a group, by what happens to its workers."""

from __future__ import annotations

import pytest

from rallypoint.launch.worker_group import GroupState, WorkerExit, WorkerGroup


def exited(group: WorkerGroup, rank: int, code: int) -> None:
    group.exited(WorkerExit(rank=rank, local_rank=rank, pid=1, time_s=0.0, code=code))


@pytest.mark.parametrize(
    ("events", "states"),
    [
        ("start 0 0 end", "healthy healthy healthy succeeded"),
        ("start 0 1 end", "healthy healthy unhealthy failed"),
        ("start 1 stop 1 end", "healthy unhealthy unhealthy unhealthy failed"),
        ("start stop 0 1 end", "healthy healthy healthy healthy stopped"),
        ("start 0 stop 0 end", "healthy healthy healthy healthy stopped"),
        ("stop end", "init stopped"),
    ],
)
def test_states(events: str, states: str) -> None:
    group = WorkerGroup([4, 5])
    seen = []
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
                exited(group, next(next_rank), int(code))
        seen.append(group.state)
    assert " ".join(state.value for state in seen) == states


def test_an_illegal_move_raises() -> None:
    group = WorkerGroup([0])
    group.started()
    with pytest.raises(RuntimeError, match="cannot go from healthy to healthy"):
        group.started()
    assert group.state is GroupState.HEALTHY
