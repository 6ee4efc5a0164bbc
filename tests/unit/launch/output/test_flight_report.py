from __future__ import annotations

import os
from typing import Any

import pytest

from rallypoint.base.flight_record import read_groups
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.launch.output.flight_report import FlightRecords, describe

SECOND = 1_000_000_000


def call(
    number: int, state: str = "running", operation: str = "all_reduce", at: int = 0
) -> RecordedCall:
    return RecordedCall(
        number=number,
        operation=operation,
        state=state,
        since_ns=at * SECOND,
        dtype="float32",
        operator="SUM",
        root=0,
        count=8,
    )


def group(
    *calls: RecordedCall, members: str = "0-7", has_left: bool = False, key: str = "k"
) -> RecordedGroup:
    return RecordedGroup(
        name="default group",
        key=key,
        members=members,
        has_left=has_left,
        queued=0,
        calls=calls,
        transfers=(),
    )


def test_nobody_is_in_anything() -> None:
    assert describe({0: [group(call(3, "done"))], 1: [group()], 2: []}, SECOND) == []


def test_ranks_are_folded_and_the_missing_named() -> None:
    seen = {rank: [group(call(16, "done"), call(17, at=2))] for rank in (0, 1, 2, 4, 5)}
    seen[3] = [group(call(15, "done"), call(16, "done", "broadcast", at=1))]
    seen[6] = []
    seen[7] = [group(call(17, "done"))]
    assert describe(seen, 14 * SECOND) == [
        "default group: ranks 0-2, 4-5 in all_reduce #17 (8 x float32, SUM) for 12.0 s; "
        "rank 3 never entered #17: last done broadcast #16, 13.0 s ago; "
        "rank 6 never joined the group; rank 7 had done all_reduce #17"
    ]


def test_ranks_outside_the_group_are_not_missed() -> None:
    (line,) = describe({0: [group(call(1), members="0,2")], 1: [], 3: []}, 0)
    assert line == "default group: rank 0 in all_reduce #1 (8 x float32, SUM) for 0 ms"


def test_a_group_that_failed_and_was_made_anew_is_not_told() -> None:
    old, new = group(call(4, "failed"), has_left=True), group(call(1, "done"), key="l")
    assert describe({0: [old, new]}, 0) == []
    assert "all_reduce #4" in describe({0: [old]}, 0)[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"operation": "send", "peer": 1, "root": 9}, "send to rank 5 (8 x float32, tag 9)"),
        ({"operation": "recv", "peer": -1, "root": 9}, "recv from any rank (8 x float32, tag 9)"),
        ({"operation": "recv", "peer": 4, "count": 0, "root": 0},
         "recv from rank 4 of the group (tag 0)"),
        ({"operation": "broadcast", "root": 1}, "broadcast #3 (8 x float32, src rank 5)"),
        ({"operation": "reduce", "root": 0}, "reduce #3 (8 x float32, SUM, dst rank 4)"),
        ({"operation": "barrier", "count": 0}, "barrier #3"),
        ({"operation": ""}, "call #3 (8 x float32)"),
    ],
)  # fmt: skip
def test_calls_in_words(changes: dict[str, Any], told: str) -> None:
    """Ranks and roots are those of the job, if they are known."""
    one = call(3).__replace__(**changes)
    calls = ((), (one,)) if one.peer is not None else ((one,), ())
    seen = group(*calls[0], members="4-5").__replace__(transfers=calls[1])
    assert describe({4: [seen]}, 0) == [f"default group: rank 4 in {told} for 0 ms"]


def test_calls_that_wait_behind_one_are_counted() -> None:
    queued = group(call(3)).__replace__(queued=3)
    assert "(8 x float32, SUM; 2 more queued)" in describe({0: [queued]}, 0)[0]
    barrier = group(call(3, operation="barrier").__replace__(count=0)).__replace__(queued=2)
    assert "barrier #3 (1 more queued) for" in describe({0: [barrier]}, 0)[0]


def test_a_rank_that_made_no_call_yet() -> None:
    (line,) = describe({0: [group(call(2), members="0-1")], 1: [group(members="0-1")]}, 0)
    assert line.endswith("; rank 1 never entered #2: has made no call yet")


def test_many_groups_are_cut() -> None:
    seen = {0: [group(call(1), members="0", key=str(number)) for number in range(100)]}
    lines = describe(seen, 0)
    number = 100 - (len(lines) - 1)
    assert lines[-1] == f"and in {number} more groups"
    assert 0 < number < 100


def test_many_parts_are_cut() -> None:
    (line,) = describe({rank: [group(call(rank))] for rank in range(40)}, 0)
    assert line.endswith("; and 28 more")


def test_global_ranks() -> None:
    some = group(members="4-6,1,9")
    assert [some.global_rank(rank) for rank in range(6)] == [4, 5, 6, 1, 9, None]
    assert group(members="").global_rank(0) is None


def test_what_makes_no_sense_is_left_out() -> None:
    records = FlightRecords(2)
    records.look({0: 0, 1: 1})
    assert records.lines() == []
    assert records.events() == []
    assert read_groups(records.fileno(), 0) == ()
    os.pwrite(records.fileno(), b"RFPR\1\0\0\0\0\0\0\0\1\0\0\0" + b"\xff" * 9000, 0)
    assert read_groups(records.fileno(), 0) == ()
    records.close()
