"""Traces the workers of this node: makes them record their calls, and reads along.

Other backends' pages are read in turn, as quickly as they are written.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.call_trace import CallTrace
from rallypoint.base.errors import HostError
from rallypoint.base.flight_record import ask_for_more, has_told_more, read_pages
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.base.worker_hook import FLIGHT_RECORD_BYTES
from rallypoint.launch.inspection.agent_client import Asking, read_status
from rallypoint.launch.inspection.node_trace import NodeTrace, WorkerTrace
from rallypoint.launch.inspection.requests import AgentStatus, RankStatus

_BETWEEN_S = 0.005
_BETWEEN_LEASES_S = 1.0
_NAMES_S = 0.3  # how long the names of calls in progress are waited for, at the end
_MOST_CALLS = 200_000  # of a worker
_MOST_OF_JOB = 1_000_000
_SELF = "/proc/self"


def trace_node(agent: Asking, seconds: float, is_over: Callable[[], bool]) -> NodeTrace:
    """The calls of an agent's workers for some time, or until `is_over`, or until they have ended.

    Raises:
        NoAnswerError: the agent does not answer.
        HostError: somebody else is tracing them, or the agent's answer is invalid.
    """
    told, descriptors = agent.ask({"ask": "look"})
    try:
        status = read_status(told)
        _lock(descriptors)
        most = max(1000, min(_MOST_CALLS, _MOST_OF_JOB // max(1, status.world_size)))
        workers = [_Traced(each, descriptors, most) for each in status.workers]
        return _trace(status, workers, seconds, is_over)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def name_clock() -> str:
    """The same for all processes that read the same monotonic clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat(f'{_SELF}/ns/time').st_ino}"
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
    status: AgentStatus, workers: Sequence[_Traced], seconds: float, is_over: Callable[[], bool]
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


def _learn_names(workers: Sequence[_Traced]) -> None:
    """A backend counts a call before it is known which call that is."""
    deadline = time.monotonic() + _NAMES_S
    while time.monotonic() < deadline:
        unnamed = [worker for worker in workers if worker.has_unnamed_calls and _lives(worker)]
        if not unnamed:
            return
        time.sleep(_BETWEEN_S)
        for worker in unnamed:
            worker.look()


def _lives(worker: _Traced) -> bool:
    return worker.pid != 0 and os.path.exists(f"/proc/{worker.pid}")


class _Traced:
    """One worker."""

    def __init__(self, rank: RankStatus, descriptors: Sequence[int], most: int) -> None:
        self.rank = rank.rank
        self.pid = rank.pid
        self._record = descriptors[0] if descriptors else -1
        self._offset = rank.local_rank * FLIGHT_RECORD_BYTES
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
        self.look()
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
            self.look()

    def end(self) -> None:
        if self._record < 0:
            return
        if self._is_tracing:
            self._calls.end()
        self.look()

    def look(self) -> None:
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
            was_quiet = not calls[page]  # if so, its earlier call tells more than nothing
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
