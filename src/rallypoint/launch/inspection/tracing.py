"""Traces the workers of this node: makes them record every call that ends, and reads along.

The calls go into a ring in the worker's flight record (native/engine/flight_record.h), in pages
that its groups do not use. The reader sets the time until which the worker records, and keeps
extending it; if the reader dies, the worker stops by itself. An entry counts only if its stamp
shows that it was complete before it was read and cannot have been overwritten since. A lock ensures
that only one process traces at a time.

Other backends' pages are read in turn, as quickly as they are written.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rallypoint.base.errors import HostError
from rallypoint.base.files import kernel_identity
from rallypoint.base.flight_record import (
    STATES,
    Names,
    ask_for_more,
    has_told_more,
    name_operation,
    name_peer,
    read_pages,
)
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.base.worker_hook import FLIGHT_RECORD_BYTES
from rallypoint.launch.inspection.agent_client import AgentConnection, read_status
from rallypoint.launch.inspection.node_trace import NodeTrace, WorkerTrace
from rallypoint.launch.inspection.requests import AgentStatus, RankStatus

_BETWEEN_S = 0.005
_BETWEEN_LEASES_S = 1.0
_NAMES_S = 0.3  # how long the names of calls in progress are waited for, at the end
_MOST_CALLS = 200_000  # of a worker
_MOST_OF_JOB = 1_000_000
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
_MOST_ATTEMPTS = 200  # at an entry that is being written; after that its writer is gone
_PUNCH_HOLE, _KEEP_SIZE = 2, 1


def trace_node(agent: AgentConnection, seconds: float, is_over: Callable[[], bool]) -> NodeTrace:
    """The calls of an agent's workers for some time, or until `is_over`, or they have ended."""
    answer, descriptors = agent.ask({"ask": "look"})
    try:
        status = read_status(answer)
        _lock(descriptors)
        most = max(1000, min(_MOST_CALLS, _MOST_OF_JOB // max(1, status.world_size)))
        workers = [_TracedWorker(each, descriptors, most) for each in status.workers]
        return _trace(status, workers, seconds, is_over)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def name_clock() -> str:
    """The same for all processes that read the same monotonic clock."""
    try:
        return kernel_identity("time")
    except OSError:
        return ""


def _lock(descriptors: Sequence[int]) -> None:
    """The kernel releases it, however this process ends."""
    for descriptor in descriptors:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            text = "this job is being traced already; wait until that `rallypoint trace` ends."
            raise HostError(text) from None


def _trace(
    status: AgentStatus,
    workers: Sequence[_TracedWorker],
    seconds: float,
    is_over: Callable[[], bool],
) -> NodeTrace:
    began_ns, wall_ns = time.monotonic_ns(), time.time_ns() - time.monotonic_ns()
    deadline = time.monotonic() + seconds
    lease = time.monotonic() + _BETWEEN_LEASES_S
    try:
        for worker in workers:
            worker.begin()
        while time.monotonic() < deadline and not is_over():
            renews = time.monotonic() >= lease
            for worker in workers:
                worker.read(renews=renews)
            if renews:
                lease = time.monotonic() + _BETWEEN_LEASES_S
                if not any(map(_lives, workers)):
                    break
            time.sleep(max(0.0, min(_BETWEEN_S, deadline - time.monotonic())))
    finally:
        for worker in workers:
            worker.end()
    _learn_names(workers)
    notes = []
    ended = [worker for worker in workers if worker.pid and not _lives(worker)]
    if ended:
        ranks = f"{len(ended)} of {len(workers)} workers"
        notes.append(f"{ranks} of node {status.node_rank} had exited before the trace ended")
    return NodeTrace(
        node_rank=status.node_rank,
        host=status.host,
        clock=name_clock(),
        began_ns=began_ns,
        ended_ns=time.monotonic_ns(),
        wall_ns=wall_ns,
        workers=tuple(worker.trace() for worker in workers),
        notes=tuple(notes),
    )


def _learn_names(workers: Sequence[_TracedWorker]) -> None:
    """A backend counts a call before it is known which call that is."""
    deadline = time.monotonic() + _NAMES_S
    while time.monotonic() < deadline:
        unnamed = [worker for worker in workers if worker.has_unnamed_calls and _lives(worker)]
        if not unnamed:
            return
        time.sleep(_BETWEEN_S)
        for worker in unnamed:
            worker.read_record()


def _lives(worker: _TracedWorker) -> bool:
    return worker.pid != 0 and os.path.exists(f"/proc/{worker.pid}")


class _TracedWorker:
    """One worker."""

    def __init__(self, rank: RankStatus, descriptors: Sequence[int], most: int) -> None:
        self.rank = rank.rank
        self.pid = rank.pid
        self._record = descriptors[0] if descriptors else -1
        self._offset = rank.record_slot * FLIGHT_RECORD_BYTES
        self._calls = CallTrace(self._record, self._offset, most=most)
        self._because = "" if descriptors else "it does not record its calls"
        self._is_tracing = False
        self._began_ns = 0
        self._before: Mapping[int, RecordedGroup] = {}
        self._groups: Mapping[int, RecordedGroup] = {}
        self._names: dict[str, list[str]] = {}
        self._foreign: dict[tuple[int, int], RecordedCall] = {}  # by page and number
        self._next_foreign_s = 0.0

    def begin(self) -> None:
        if self._because:
            return
        self.read_record()
        self._before = self._groups
        self._begin_calls()

    def read(self, *, renews: bool) -> None:
        """Read new calls."""
        if self._is_tracing:
            if renews:
                self._calls.go_on()
            self._calls.read()
        elif renews and not self._because:
            self._begin_calls()  # it may have formed its first group
        if renews or (self._next_foreign_s and time.monotonic() >= self._next_foreign_s):
            self.read_record()

    def end(self) -> None:
        if self._record < 0:
            return
        if self._is_tracing:
            self._calls.end()
        self.read_record()

    def read_record(self) -> None:
        """Read the record itself: groups, calls in progress, and those of other backends."""
        names, groups = read_pages(self._record, self._offset)
        if groups:
            self._names, self._groups = names, groups
        others = {page: g for page, g in groups.items() if g.backend != "rallypoint"}
        for page, group in others.items():
            for call in group.calls:
                if call.operation:
                    self._foreign[page, call.number] = call
        self._next_foreign_s = time.monotonic() + 0.02 if others else 0.0
        if others and has_told_more(self._record, self._offset):
            ask_for_more(self._record, self._offset)

    @property
    def has_unnamed_calls(self) -> bool:
        """Whether another backend has begun a call of which only the number is known."""
        return any(not call.operation for group in self._groups.values() for call in group.calls)

    def trace(self) -> WorkerTrace:
        """The calls that were seen."""
        groups = {**self._before, **self._groups}
        calls: dict[int, dict[int, RecordedCall]] = {page: {} for page in groups}
        transfers: dict[int, dict[int, RecordedCall]] = {page: {} for page in groups}
        for page, is_transfer, call in self._calls.calls(self._names):
            kind = transfers if is_transfer else calls
            kind.setdefault(page, {})[call.number] = call
        for (page, number), call in self._foreign.items():
            calls[page][number] = call
        for page, group in groups.items():
            was_quiet = not calls[page]  # if so, its earlier call is better than nothing
            for call in group.calls:
                if was_quiet or call.state == "running":
                    calls[page].setdefault(call.number, call)
            for call in group.transfers:
                transfers[page].setdefault(call.number, call)
        return WorkerTrace(
            rank=self.rank,
            pid=self.pid,
            groups=tuple(
                group.__replace__(
                    calls=tuple(calls[page][number] for number in sorted(calls[page])),
                    transfers=tuple(transfers[page][number] for number in sorted(transfers[page])),
                )
                for page, group in groups.items()
            ),
            exact_ns=self._began_ns if self._is_tracing else 0,
            missed=self._calls.missed,
            missed_of_others=self._missed_of_others(),
            left_out=self._calls.left_out,
            because="" if self._is_tracing or self._foreign else self._because,
        )

    def _begin_calls(self) -> None:
        self._began_ns = time.monotonic_ns()
        because = self._calls.begin()
        self._is_tracing = not because
        if because and any(group.backend == "rallypoint" for group in self._groups.values()):
            self._because = because

    def _missed_of_others(self) -> int:
        """Calls of other backends whose numbers were skipped."""
        numbers: dict[int, list[int]] = {}
        for page, number in self._foreign:
            numbers.setdefault(page, []).append(number)
        return sum(max(each) - min(each) + 1 - len(each) for each in numbers.values())


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
        self._attempts = 0
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
        """It is to continue for some seconds more."""
        self._write_until(time.monotonic_ns() + _LEASE_NS)

    def pause(self) -> None:
        """It is to stop until it is to continue."""
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
                self._attempts += 1
                if self._attempts < _MOST_ATTEMPTS:
                    return
                self._next += 1
                self.missed += 1
            self._attempts = 0

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
