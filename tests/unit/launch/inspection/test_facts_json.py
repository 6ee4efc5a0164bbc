"""Facts that go through JSON are the same afterwards; what is none is refused."""

from __future__ import annotations

import json

import pytest

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.diagnosis.facts import (
    Facts,
    Flow,
    Frame,
    Node,
    Process,
    Stack,
    Thread,
    WorkerEnd,
    WorkerFacts,
)
from rallypoint.launch.inspection.facts_json import decode, encode

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
            flows=(Flow(rank=0, peer="::1", unacknowledged_bytes=1, retransmits=2, stalled_s=3.5),),
        ),
        Node(node_rank=1, host="other", silent_s=3.5),
    ),
)


def test_facts_come_back_as_they_were() -> None:
    assert decode(Facts, json.loads(json.dumps(encode(FACTS)))) == FACTS


def test_what_has_its_default_takes_no_place() -> None:
    assert encode(Thread(id=1, name="x", state="S")) == {"id": 1, "name": "x", "state": "S"}


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
    ],
)
def test_what_makes_no_sense_is_refused(data: object) -> None:
    with pytest.raises(ControlMessageError):
        decode(Thread, data)
