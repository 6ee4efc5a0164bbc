"""Records that go through JSON are the same afterwards; whatever else comes is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.json_records import from_json, from_row, to_json, to_row
from rallypoint.base.record import Record
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.diagnosis.facts import (
    Facts,
    Frame,
    Node,
    Process,
    Stack,
    StalledConnection,
    Thread,
    WorkerEnd,
    WorkerFacts,
)

CALL = RecordedCall(
    number=3,
    operation="all_reduce",
    state="running",
    since_ns=1 << 60,
    dtype="float32",
    operator="SUM",
    root=0,
    count=8,
    peer=None,
    site="train.py:40",
    shape=(2, 4),
)
GROUP = RecordedGroup(
    name="default group",
    key="0",
    members="0-3",
    has_left=False,
    queued=1,
    calls=(CALL,),
    transfers=(CALL.__replace__(peer=1),),
)
PROCESS = Process(
    pid=7,
    command="python é",
    state="S",
    cpu=1,
    threads=(Thread(id=7, name="python", state="S", syscall="read", path="/x"),),
    children=(Process(pid=8, command="cat", state="D"),),
)
WORKER = WorkerFacts(
    rank=1,
    local_rank=1,
    process=PROCESS,
    groups=(GROUP,),
    stacks=(Stack(thread="0x1", frames=(Frame(file="a.py", line=1, function="f"),), is_main=True),),
    library="spin.so",
    gil="0x7f",
)
DEAD = WorkerFacts(rank=0, local_rank=0, process=None, end=WorkerEnd(code=None, signal="SIGKILL"))
FACTS = Facts(
    run_id="none",
    round=0,
    world_size=2,
    nodes=(
        Node(
            node_rank=0,
            host="box",
            now_ns=5,
            ranks=(0, 1),
            workers=(DEAD, WORKER),
            oom_kills=1,
            flows=(
                StalledConnection(
                    rank=0, peer="::1", unacknowledged_bytes=1, retransmits=2, stalled_s=3.5
                ),
            ),
        ),
        Node(node_rank=1, host="other", silent_s=3.5),
    ),
)


class Colour(Enum):
    RED = "the colour red"
    BLUE = "the colour blue"


class Point(Record):
    """A record that contains records of its own kind."""

    x: float
    name: str = ""
    colour: Colour = Colour.RED
    next: Point | None = None
    pairs: tuple[tuple[str, int], ...] = ()
    rest: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """A dataclass that contains records, and mappings."""

    points: tuple[Point, ...] = ()
    by_number: Mapping[int, float] = field(default_factory=dict)
    words: Mapping[str, object] = field(default_factory=dict)


POINT = Point(
    1.5, "a", Colour.BLUE, next=Point(-2.0), pairs=(("b", 1), ("c", 2)), rest=[{"any": None}]
)
MAP = Map(points=(POINT, Point(0.5)), by_number={3: 0.5}, words={"a": [1, {"b": True}]})


def through_json(value: object) -> object:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "record", [FACTS, POINT, MAP, Map()], ids=lambda record: type(record).__name__
)
def test_records_come_back_as_they_were(record: object) -> None:
    kind = type(record)
    assert from_json(kind, through_json(to_json(record))) == record
    assert from_json(kind, through_json(to_json(record, with_defaults=True))) == record
    if record is not FACTS:  # which has a whole number where others have fractions
        assert from_row(kind, through_json(to_row(record))) == record


def test_fields_with_their_defaults_are_omitted_by_name() -> None:
    assert to_json(Thread(id=1, name="x", state="S")) == {"id": 1, "name": "x", "state": "S"}
    assert to_json((Point(1.0),)) == [{"x": 1.0}]
    everything: dict[str, object] = {
        "name": "",
        "colour": "RED",
        "next": None,
        "pairs": [],
        "rest": None,
    }
    assert to_json(Point(1.0), with_defaults=True) == {"x": 1.0, **everything}


def test_fields_are_all_there_by_position() -> None:
    assert to_row(Point(1.0, next=Point(2.0))) == [
        *(1.0, "", "RED"),
        [2.0, "", "RED", None, [], None],
        *([], None),
    ]


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"id": "1", "name": "x", "state": "S"},
        {"id": True, "name": "x", "state": "S"},
        {"id": 1, "name": None, "state": "S"},
        {"id": 1, "name": "x", "state": "S", "more": 1},
        {"id": 1, "name": "x", "state": "S", "cpu": 10**400},
        {"id": 1, "name": "x", "state": "S", "cpu": float("nan")},
        {"id": 1, "name": "x", "state": "S", "cpu": False},
    ],
    ids=lambda data: str(data)[:60],
)
def test_what_is_not_a_record_by_name_is_refused(data: object) -> None:
    with pytest.raises(ControlMessageError):
        from_json(Thread, data)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        [],
        [1.0, "", "RED", None, []],
        [1.0, "", "RED", None, [], None, None],
        [1, "", "RED", None, [], None],
        [float("inf"), "", "RED", None, [], None],
        [1.0, None, "RED", None, [], None],
        [1.0, "", "GREEN", None, [], None],
        [1.0, "", "the colour red", None, [], None],
        [1.0, "", ["RED"], None, [], None],
        [1.0, "", "RED", {"x": 1.0}, [], None],
        [1.0, "", "RED", None, [["b"]], None],
        [1.0, "", "RED", None, [["b", True]], None],
        [1.0, "", "RED", None, "b", None],
    ],
    ids=str,
)
def test_what_is_not_a_record_by_position_is_refused(data: object) -> None:
    with pytest.raises(ControlMessageError):
        from_row(Point, data)


@pytest.mark.parametrize("data", [{"by_number": {"x": 0.5}}, {"by_number": []}, {"words": "a"}])
def test_what_is_not_a_mapping_is_refused(data: object) -> None:
    with pytest.raises(ControlMessageError):
        from_json(Map, data)


def test_records_within_records_without_end_are_refused() -> None:
    by_name: object = None
    by_position: object = None
    for _ in range(100_000):
        by_name = {"x": 1.0, "next": by_name}
        by_position = [1.0, "", "RED", by_position, [], None]
    with pytest.raises(ControlMessageError):
        from_json(Point, by_name)
    with pytest.raises(ControlMessageError):
        from_row(Point, by_position)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
NAMES = st.sampled_from(["x", "name", "colour", "next", "pairs", "rest", "other"])
ANYTHING = st.recursive(
    PLAIN | st.sampled_from(["RED", "BLUE"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(NAMES, inner, max_size=6),
)


@given(ANYTHING)
def test_whatever_comes_is_a_record_or_refused(data: object) -> None:
    for read in (from_json, from_row):
        try:
            point = read(Point, data)
        except ControlMessageError:
            continue
        assert type(point.x) is float and isinstance(point.colour, Colour)
        assert point.next is None or isinstance(point.next, Point)
