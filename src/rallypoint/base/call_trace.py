"""Asks a worker to record every call that ends, and reads the record while it is written.

The calls go into a ring in the worker's flight record (native/engine/flight_record.h), in pages
that its groups do not use. The reader sets the time until which the worker records, and keeps
extending it; if the reader dies, the worker stops by itself. An entry counts only if its stamp
shows that it was complete before it was read and cannot have been overwritten since. The caller
ensures that only one process traces at a time.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time

from rallypoint.base.flight_record import STATES, Names, name_operation, name_peer
from rallypoint.base.recorded_call import RecordedCall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_PAGE = 4096
_RING_PAGE, _PAGES = 512, 1024
_ENTRY_BYTES = 64
RING_CALLS = (_PAGES - _RING_PAGE) * _PAGE // _ENTRY_BYTES
_VERSION = 1
_GROUPS_AT, _GROUPS = 12, struct.Struct("=I")
# The number of calls, the end of tracing, the version.
_CONTROL_AT, _CONTROL = 4064, struct.Struct("=QQI")
_UNTIL_AT, _UNTIL = _CONTROL_AT + 8, struct.Struct("=Q")
_ENTRY = struct.Struct("=QQQHBBiQQII8x")
_STAMP = struct.Struct("=Q56x")
_LEASE_NS = 5_000_000_000
_MOST_LOOKS = 200  # at an entry that is being written; after that its writer is gone
_PUNCH_HOLE, _KEEP_SIZE = 2, 1


class CallTrace:
    """The tracing of one worker.

    Args:
        most: calls that are kept; later ones are only counted.

    Attributes:
        missed: calls that were written over before they were read.
        left_out: calls after the first `most`.
    """

    def __init__(self, descriptor: int, offset: int, *, most: int) -> None:
        self.missed = self.left_out = 0
        self._descriptor, self._offset, self._most = descriptor, offset, most
        self._ring = offset + _RING_PAGE * _PAGE
        self._next = 0
        self._looks = 0
        self._entries = bytearray()

    def begin(self) -> str:
        """Have the worker write its calls; why it does not, or nothing."""
        self._next, _, version = self._control()
        if version != _VERSION:
            return "its version of rallypoint cannot be traced, or it has formed no group yet"
        self.go_on()
        (groups,) = _GROUPS.unpack(os.pread(self._descriptor, 4, self._offset + _GROUPS_AT))
        if groups >= _RING_PAGE:
            self.end()
            return f"it has {groups} groups, but tracing supports at most {_RING_PAGE - 1}"
        return ""

    def go_on(self) -> None:
        """It is to go on for some seconds more."""
        self._write_until(time.monotonic_ns() + _LEASE_NS)

    def pause(self) -> None:
        """It is to stop until it is to go on."""
        self._write_until(0)

    def end(self) -> None:
        """Have it stop, take what is left, and give the ring's memory back."""
        self.pause()
        self.read()
        fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
        if fallocate is not None:  # otherwise it is kept until the worker ends
            length = (_PAGES - _RING_PAGE) * _PAGE
            fallocate(
                self._descriptor,
                _PUNCH_HOLE | _KEEP_SIZE,
                ctypes.c_int64(self._ring),
                ctypes.c_int64(length),
            )

    def read(self) -> None:
        """Take what has been written since the last time."""
        end, _, _ = self._control()
        self._skip(end)
        while self._next < end:
            # Read up to the end of the ring, and the rest from its beginning.
            count = min(end - self._next, RING_CALLS - self._next % RING_CALLS)
            at = self._ring + self._next % RING_CALLS * _ENTRY_BYTES
            stamps = os.pread(self._descriptor, count * _ENTRY_BYTES, at)
            data = os.pread(self._descriptor, count * _ENTRY_BYTES, at)
            complete = self._complete(stamps)
            first = self._next
            self._skip(self._control()[0])
            lost = min(complete, self._next - first)
            self._keep(data[lost * _ENTRY_BYTES : complete * _ENTRY_BYTES])
            self._next = max(self._next, first + complete)
            if complete < count and self._next == first + complete:
                self._looks += 1
                if self._looks < _MOST_LOOKS:
                    return
                self._next += 1
                self.missed += 1
            self._looks = 0

    def calls(self, names: Names) -> Iterator[tuple[int, bool, RecordedCall]]:
        """What was read: a group's page, whether it is a send or receive, and the call."""
        for entry in _ENTRY.iter_unpack(self._entries):
            _, word, since_ns, operation, dtype, operator, root, count, ended_ns, peer, page = entry
            try:
                name = name_operation(operation, names)
                is_transfer = name in ("send", "recv")
                call = RecordedCall(
                    number=(word >> 2) - 1,
                    operation=name,
                    state=STATES[word & 3],
                    since_ns=since_ns,
                    dtype=names["dtypes"][dtype],
                    operator=names["operators"][operator],
                    root=root,
                    count=count,
                    peer=name_peer(peer) if is_transfer else None,
                    ended_ns=max(since_ns, ended_ns),
                )
            except (KeyError, IndexError):  # the record of a broken worker
                continue
            yield page, is_transfer, call

    def _complete(self, stamps: bytes) -> int:
        """How many entries in a row, from the next one on, are complete or were written over."""
        count = 0
        for number, (stamp,) in enumerate(_STAMP.iter_unpack(stamps), self._next + 1):
            if stamp < number:
                break
            count += 1
        return count

    def _skip(self, end: int) -> None:
        """What was written over, or may be just now, is lost."""
        lost = end - RING_CALLS - self._next
        if lost > 0:
            self._next += lost
            self.missed += lost

    def _keep(self, entries: bytes) -> None:
        room = max(0, self._most * _ENTRY_BYTES - len(self._entries))
        self._entries += entries[:room]
        self.left_out += max(0, len(entries) - room) // _ENTRY_BYTES

    def _control(self) -> tuple[int, int, int]:
        data = os.pread(self._descriptor, _CONTROL.size, self._offset + _CONTROL_AT)
        traced, until_ns, version = _CONTROL.unpack(data)
        return traced, until_ns, version

    def _write_until(self, until_ns: int) -> None:
        os.pwrite(self._descriptor, _UNTIL.pack(until_ns), self._offset + _UNTIL_AT)
