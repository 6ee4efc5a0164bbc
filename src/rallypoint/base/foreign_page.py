"""Reads the flight record of a group of another backend (native/engine/foreign_page.h).

Calls are recorded as PyTorch's Flight Recorder reports them, and are read alternately with its
counters. The counters are newer: a call that they count as finished is finished, and a call that
only they count has no name yet.
"""

from __future__ import annotations

import struct

from rallypoint.base.recorded_call import RecordedCall, RecordedGroup

FOREIGN_BYTES = 2 * 4096
_STATUS = struct.Struct("=IIQQQQQ")
_CALL = struct.Struct("=QQQQ48s16s8qI28x")
_TRANSFER = struct.Struct("=QQQIiI28s")
_CALLS = 32
_FIRST_CALL = 1024
_FIRST_TRANSFER = _FIRST_CALL + _CALLS * _CALL.size
_STATES = {1: "running", 2: "done", 3: "failed"}
_ANY_RANK, _UNKNOWN = 0xFFFFFFFF, 0xFFFFFFFF
# PyTorch's names for them in C++.
_DTYPES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"},
    **{"Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}


def read_foreign_group(looks: list[bytes], *, has_left: bool) -> RecordedGroup:
    """The group whose pages were read three times in a row; raises ValueError for nonsense."""
    import json

    _, _, looked_ns, changed_ns, enqueued, completed, transfers_begun = _STATUS.unpack_from(
        looks[1]
    )
    said = json.loads(looks[1][_STATUS.size : _FIRST_CALL].rstrip(b"\0"))
    calls = _calls(looks, completed)
    latest = enqueued - transfers_begun - 1  # the backend counts from 1, and counts both
    if looked_ns and latest > (calls[-1].number if calls else -1):
        state = "done" if completed >= enqueued else "running"
        calls.append(_unnamed(latest, state, changed_ns))
    return RecordedGroup(
        name=str(said.get("name", "")),
        key=str(said.get("key", "")),
        members=str(said.get("members", "")),
        has_left=has_left,
        queued=sum(call.state == "running" for call in calls),
        calls=tuple(calls),
        transfers=_transfers(looks),
        backend=str(said.get("backend", "")),
        is_complete=said.get("is_complete") is True,
    )


def _calls(looks: list[bytes], completed: int) -> list[RecordedCall]:
    found = []
    for at in range(_FIRST_CALL, _FIRST_TRANSFER, _CALL.size):
        before, fields, after = (_CALL.unpack_from(look, at) for look in looks)
        word, since_ns, ended_ns, count_of_backend, operation, dtype, *shape, dimensions = fields
        if not before[0] >> 2 == word >> 2 == after[0] >> 2 != 0:
            continue
        is_done = after[0] & 3 == 2 or count_of_backend <= completed
        is_known = dimensions <= len(shape)
        sizes = tuple(shape[:dimensions]) if is_known else ()
        found.append(
            RecordedCall(
                number=(word >> 2) - 1,
                operation=_text(operation),
                state="done" if is_done else "running",
                since_ns=since_ns,
                dtype=_DTYPES.get(_text(dtype), _text(dtype).lower()),
                operator="",
                root=-1,
                count=_items(sizes) if is_known else 0,
                ended_ns=ended_ns if ended_ns >= since_ns else 0,
                shape=sizes,
            )
        )
    return sorted(found, key=lambda call: call.number)


def _unnamed(number: int, state: str, since_ns: int) -> RecordedCall:
    """A call of which only the number is known, and since when."""
    return RecordedCall(
        number=number,
        operation="",
        state=state,
        since_ns=since_ns,
        dtype="",
        operator="",
        root=-1,
        count=0,
    )


def _transfers(looks: list[bytes]) -> tuple[RecordedCall, ...]:
    found = []
    for at in range(_FIRST_TRANSFER, FOREIGN_BYTES, _TRANSFER.size):
        before, fields, after = (_TRANSFER.unpack_from(look, at) for look in looks)
        word, since_ns, count, peer, tag, sends, dtype = fields
        if not before[0] >> 2 == word >> 2 == after[0] >> 2 != 0 or after[0] & 3 == 2:
            continue
        found.append(
            RecordedCall(
                number=(word >> 2) - 1,
                operation="send" if sends else "recv",
                state=_STATES[after[0] & 3],
                since_ns=since_ns,
                dtype=_text(dtype),
                operator="",
                root=tag,
                count=count,
                peer=-1 if peer == _ANY_RANK else peer,
            )
        )
    return tuple(sorted(found, key=lambda call: call.number))


def _items(shape: tuple[int, ...]) -> int:
    items = 1
    for size in shape:
        items *= size
    return items


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")
