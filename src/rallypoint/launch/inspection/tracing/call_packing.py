"""A node's trace as a message between agents, which may be large."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.json_records import from_json, to_json
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.launch.inspection.tracing.node_trace import NodeTrace, WorkerTrace

LATE_S = 15.0  # an answer may arrive this long after the traced time
_MOST_CHARACTERS = 4 << 20
_MOST_BYTES = 512 << 20  # unpacked


def pack(trace: NodeTrace) -> dict[str, object]:
    """The message; if it would be too large, the last calls are dropped, and counted."""
    while True:
        data = zlib.compress(json.dumps(to_json(trace)).encode(), 1)
        text = base64.b64encode(data).decode()
        if len(text) <= _MOST_CHARACTERS:
            return {"trace": text}
        share = 0.9 * _MOST_CHARACTERS / len(text)
        workers = tuple(_shortened(worker, share) for worker in trace.workers)
        trace = replace(trace, workers=workers)


def unpack(message: dict[str, object]) -> NodeTrace:
    """Read it.

    Raises:
        ControlMessageError: it is invalid, or of another version.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(str(message["trace"])), _MOST_BYTES)
        return from_json(NodeTrace, json.loads(data))
    except (KeyError, ValueError, zlib.error) as error:
        raise ControlMessageError(f"this trace is invalid: {error!r}") from None


def _shortened(worker: WorkerTrace, share: float) -> WorkerTrace:
    groups = tuple(_of_group(group, share) for group in worker.groups)
    lost = sum(map(_count, worker.groups)) - sum(map(_count, groups))
    return replace(worker, groups=groups, left_out=worker.left_out + lost)


def _of_group(group: RecordedGroup, share: float) -> RecordedGroup:
    return RecordedGroup(
        name=group.name,
        key=group.key,
        members=group.members,
        has_left=group.has_left,
        queued=group.queued,
        calls=_first(group.calls, share),
        transfers=_first(group.transfers, share),
        backend=group.backend,
        is_complete=group.is_complete,
        transfers_begun=group.transfers_begun,
    )


def _first(calls: tuple[RecordedCall, ...], share: float) -> tuple[RecordedCall, ...]:
    """Calls in progress are always included."""
    count = int(len(calls) * share)
    return (*calls[:count], *(call for call in calls[count:] if call.state == "running"))


def _count(group: RecordedGroup) -> int:
    return len(group.calls) + len(group.transfers)
