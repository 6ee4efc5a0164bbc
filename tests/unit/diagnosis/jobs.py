"""Jobs as facts: what workers are in, in few words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.diagnosis.answer import explanation_of
from rallypoint.diagnosis.explanation import Explanation
from rallypoint.diagnosis.facts import (
    Facts,
    Frame,
    Node,
    Process,
    Stack,
    Thread,
    WorkerEnd,
    WorkerFacts,
)

NOW_S = 1000.0
TORCH = "/venv/lib/python3.11/site-packages/torch"


def ns(time_s: float) -> int:
    return round(time_s * 1e9)


def call(
    number: int,
    operation: str = "all_reduce",
    *,
    state: str = "running",
    for_s: float = 12.0,
    took_s: float = 0.01,
    **fields: Any,
) -> RecordedCall:
    """Begun `for_s` ago if it runs, else ended `for_s` ago."""
    at = NOW_S - for_s
    given: dict[str, Any] = {
        "dtype": "float32",
        "operator": "SUM",
        "root": 0,
        "count": 8,
        "since_ns": ns(at if state == "running" else at - took_s),
        "ended_ns": 0 if state == "running" else ns(at),
    }
    return RecordedCall(number=number, operation=operation, state=state, **{**given, **fields})


def done(number: int, operation: str = "all_reduce", **fields: Any) -> RecordedCall:
    return call(number, operation, state="done", **fields)


def transfer(
    operation: str, peer: int, *, tag: int = 0, site: str = "", **fields: Any
) -> RecordedCall:
    return call(fields.pop("number", 0), operation, peer=peer, root=tag, site=site, **fields)


def group(
    *calls: RecordedCall,
    members: str = "0-3",
    transfers: tuple[RecordedCall, ...] = (),
    **fields: Any,
) -> RecordedGroup:
    given: dict[str, Any] = {"name": "default group", "key": "k", "has_left": False, "queued": 0}
    return RecordedGroup(calls=calls, members=members, transfers=transfers, **{**given, **fields})


def frames(*places: str) -> tuple[Frame, ...]:
    """``"/home/u/train.py:31 step"``, the innermost first."""
    found = []
    for place in places:
        at, _, function = place.rpartition(" ")
        at, function = (at, function) if ":" in at else (function, "")
        file, _, line = at.rpartition(":")
        found.append(Frame(file=file, line=int(line), function=function or "main"))
    return tuple(found)


def stack(*places: str, **fields: Any) -> Stack:
    given: dict[str, Any] = {"thread": "0x1", "is_main": True}
    return Stack(frames=frames(*places), **{**given, **fields})


def process(rank: int, *, syscall: str = "", path: str = "", **fields: Any) -> Process:
    pid = 4000 + rank
    given: dict[str, Any] = {"pid": pid, "command": "python train.py", "state": "S", "age_s": 60.0}
    given |= fields
    wait = given.pop("wait", "")
    thread = Thread(
        id=given["pid"], name="python", state=given["state"], cpu=given.get("cpu", 0.0),
        syscall=syscall, path=path, wait=wait,
    )  # fmt: skip
    return Process(**{"threads": (thread,), **given})


def worker(
    rank: int,
    *groups: RecordedGroup,
    stacks: Iterable[Stack] = (),
    at: Process | None = None,
    **fields: Any,
) -> WorkerFacts:
    """A living one; `at`: what the kernel says."""
    given: dict[str, Any] = {"local_rank": rank, "process": at or process(rank)}
    return WorkerFacts(rank=rank, groups=groups, stacks=tuple(stacks), **{**given, **fields})


def waiting(
    rank: int, *groups: RecordedGroup, line: int = 40, function: str = "all_reduce"
) -> WorkerFacts:
    """In a call of torch, by the stack as well."""
    return worker(
        rank,
        *groups,
        stacks=[
            stack(
                f"{TORCH}/distributed/distributed_c10d.py:3252 {function}",
                f"{TORCH}/distributed/c10d_logger.py:83 wrapper",
                f"/home/u/train.py:{line}",
            )
        ],
        at=process(rank, syscall="futex"),
    )


def sleeping(rank: int, *groups: RecordedGroup, line: int = 31) -> WorkerFacts:
    return worker(
        rank,
        *groups,
        stacks=[stack(f"/home/u/train.py:{line} load", "/home/u/train.py:50")],
        at=process(rank, syscall="clock_nanosleep"),
    )


def ended(rank: int, *groups: RecordedGroup, code: int | None = 0, **fields: Any) -> WorkerFacts:
    return WorkerFacts(
        rank=rank, local_rank=rank, process=None, groups=groups, end=WorkerEnd(code=code, **fields)
    )


def killed(
    rank: int, *groups: RecordedGroup, signal: str = "SIGKILL", **fields: Any
) -> WorkerFacts:
    return ended(rank, *groups, code=None, signal=signal, **fields)


def job(*workers: WorkerFacts, world: int | None = None, **fields: Any) -> Facts:
    """On one node."""
    ordered = tuple(sorted(workers, key=lambda each: each.rank))
    given: dict[str, Any] = {"node_rank": 0, "host": "box1"}
    node = Node(
        **{**given, **fields},
        now_ns=ns(NOW_S),
        workers=ordered,
        ranks=tuple(each.rank for each in ordered),
    )
    return Facts(run_id="r", round=1, world_size=world or len(workers), nodes=(node,))


def looked(facts: Facts) -> Explanation:
    """Both looks show the same."""
    return explanation_of(replace(facts), facts)
