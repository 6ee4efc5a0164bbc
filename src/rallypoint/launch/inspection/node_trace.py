"""The trace of a job: data only, and as a message between agents, which may be large.

Times are of the monotonic clock of the worker's machine.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.json_records import from_json, to_json
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup

LATE_S = 15.0  # an answer may arrive this long after the traced time
_MOST_CHARACTERS = 4 << 20
_MOST_BYTES = 512 << 20  # unpacked


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    """The calls of one worker.

    Attributes:
        pid: of its process; 0: not known.
        groups: with all calls that were seen, including completed sends and receives.
        exact_ns: since when the times of our calls are exact, before that within some milliseconds.
        missed: calls that were overwritten before they could be read.
        missed_of_others: the same of other backends.
        left_out: calls at the end for which there was no room.
        because: why it could not be traced; then only its last calls are known.
    """

    rank: int
    pid: int
    groups: tuple[RecordedGroup, ...]
    exact_ns: int = 0
    missed: int = 0
    missed_of_others: int = 0
    left_out: int = 0
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTrace:
    """The calls of a node's workers.

    Attributes:
        clock: names its monotonic clock; empty: not known. Nodes with the same name share it.
        began_ns, ended_ns: of the time that was traced.
        wall_ns: the machine's time of day minus that clock; None: not known.
        notes: what could not be seen, as sentences.
    """

    node_rank: int
    host: str
    clock: str
    began_ns: int
    ended_ns: int
    wall_ns: int | None
    workers: tuple[WorkerTrace, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """The calls of a job's workers.

    Attributes:
        notes: what could not be seen, as sentences.
    """

    run_id: str
    round: int
    nodes: tuple[NodeTrace, ...]
    notes: tuple[str, ...] = ()


def pack_trace(trace: NodeTrace) -> dict[str, object]:
    """The message; if it would be too large, the last calls are dropped, and counted."""
    while True:
        data = zlib.compress(json.dumps(to_json(trace)).encode(), 1)
        text = base64.b64encode(data).decode()
        if len(text) <= _MOST_CHARACTERS:
            return {"trace": text}
        share = 0.9 * _MOST_CHARACTERS / len(text)
        workers = tuple(_shortened(worker, share) for worker in trace.workers)
        trace = replace(trace, workers=workers)


def unpack_trace(message: Mapping[str, object]) -> NodeTrace:
    """Read it."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(str(message["trace"])), _MOST_BYTES)
        return from_json(NodeTrace, json.loads(data))
    except (KeyError, ValueError, RecursionError, zlib.error) as error:
        raise ControlMessageError(f"this trace is invalid: {error!r}") from None


def _shortened(worker: WorkerTrace, share: float) -> WorkerTrace:
    groups = tuple(
        group.__replace__(
            calls=_first(group.calls, share), transfers=_first(group.transfers, share)
        )
        for group in worker.groups
    )
    lost = sum(map(_count, worker.groups)) - sum(map(_count, groups))
    return replace(worker, groups=groups, left_out=worker.left_out + lost)


def _first(calls: tuple[RecordedCall, ...], share: float) -> tuple[RecordedCall, ...]:
    """Calls in progress are always included."""
    count = int(len(calls) * share)
    return (*calls[:count], *(call for call in calls[count:] if call.state == "running"))


def _count(group: RecordedGroup) -> int:
    return len(group.calls) + len(group.transfers)
