"""A node's trace as a message: it comes out as it went in, and is cut if it is too large."""

from __future__ import annotations

import random

import pytest

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.launch.inspection import node_trace
from rallypoint.launch.inspection.node_trace import NodeTrace, WorkerTrace, pack_trace, unpack_trace


def trace_of(calls: int) -> NodeTrace:
    chance = random.Random(1)
    made = [
        RecordedCall(
            number=number,
            operation="all_reduce",
            state="running" if number == calls - 1 else "done",
            since_ns=chance.randrange(1 << 60),
            dtype="float32",
            operator="SUM",
            root=0,
            count=10,
            ended_ns=chance.randrange(1 << 60),
        )
        for number in range(calls)
    ]
    group = RecordedGroup(
        name="g", key="k", members="0-1", has_left=False, queued=0, calls=tuple(made), transfers=()
    )
    worker = WorkerTrace(rank=0, pid=1, groups=(group,), exact_ns=5, missed=2)
    return NodeTrace(
        node_rank=3, host="h", clock="c", began_ns=1, ended_ns=2, wall_ns=None, workers=(worker,)
    )


def test_there_and_back() -> None:
    assert unpack_trace(pack_trace(trace_of(100))) == trace_of(100)


def test_what_is_too_large_is_cut_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_trace, "_MOST_CHARACTERS", 20_000)
    (worker,) = unpack_trace(pack_trace(trace_of(5000))).workers
    calls = worker.groups[0].calls
    assert 100 < len(calls) < 4900
    assert worker.left_out + len(calls) == 5000
    assert [call.number for call in calls[:-1]] == list(range(len(calls) - 1))
    assert calls[-1].state == "running"


@pytest.mark.parametrize("message", [{}, {"trace": "?"}, {"trace": "AAAA"}, {"trace": 7}])
def test_nonsense(message: dict[str, object]) -> None:
    with pytest.raises(ControlMessageError, match="is invalid"):
        unpack_trace(message)
