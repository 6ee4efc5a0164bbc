"""Reads the ring of a worker that a test plays: whole, run over, half written, broken."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from rallypoint.launch.inspection.tracing import RING_CALLS, CallTrace

OFFSET = 4 << 20
NAMES = {
    "operations": ["all_reduce", "send"],
    "dtypes": ["float32"],
    "operators": ["SUM"],
}


class Worker:
    """Writes as native/engine/flight_record.cc does."""

    def __init__(self) -> None:
        self.memory = os.memfd_create("test")
        os.truncate(self.memory, 2 * OFFSET)
        self.written = 0
        self.set_version(1)

    def set_version(self, version: int) -> None:
        os.pwrite(self.memory, struct.pack("=I", version), OFFSET + 4080)

    def set_groups(self, groups: int) -> None:
        os.pwrite(self.memory, struct.pack("=I", groups), OFFSET + 12)

    @property
    def until_ns(self) -> int:
        return int(struct.unpack("=Q", os.pread(self.memory, 8, OFFSET + 4072))[0])

    def take(self, count: int = 1) -> None:
        """Places in the ring, without writing there."""
        self.written += count
        os.pwrite(self.memory, struct.pack("=Q", self.written), OFFSET + 4064)

    def fill(self, place: int, *, operation: int = 0, peer: int = 0) -> None:
        word = (place + 1) << 2 | 2
        what = struct.pack("=HBBi", operation, 0, 0, 0)
        entry = struct.pack("=QQQ8sQQII8x", place + 1, word, 100, what, 10, 200, peer, 3)
        at = OFFSET + 512 * 4096 + place % RING_CALLS * 64
        os.pwrite(self.memory, entry, at)

    def call(self, count: int = 1) -> None:
        for _ in range(count):
            self.take()
            self.fill(self.written - 1)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    os.close(made.memory)


def numbers(trace: CallTrace) -> list[int]:
    return [call.number for _, _, call in trace.calls(NAMES)]


def test_calls_are_read_once_and_in_order(worker: Worker) -> None:
    worker.call(5)  # before anybody traces
    trace = CallTrace(worker.memory, OFFSET, most=100_000)
    assert trace.begin() == ""
    assert worker.until_ns > 0
    trace.read()
    for count in (0, 1, 7, RING_CALLS - 20, 100, 3000):  # past the ring's end
        worker.call(count)
        trace.read()
    assert numbers(trace) == list(range(5, worker.written))
    assert (trace.missed, trace.left_out) == (0, 0)
    page, is_transfer, call = next(trace.calls(NAMES))
    assert (page, is_transfer, call.since_ns, call.ended_ns) == (3, False, 100, 200)
    assert (call.operation, call.state, call.count, call.peer) == ("all_reduce", "done", 10, None)
    trace.end()
    assert worker.until_ns == 0
    assert os.pread(worker.memory, 64, OFFSET + 512 * 4096) == bytes(64)


def test_what_was_written_over_is_counted(worker: Worker) -> None:
    trace = CallTrace(worker.memory, OFFSET, most=1_000_000)
    trace.begin()
    worker.call(RING_CALLS + 10)
    trace.read()
    assert trace.missed == 10
    assert numbers(trace) == list(range(10, RING_CALLS + 10))


def test_what_is_being_written_is_waited_for_but_not_for_ever(worker: Worker) -> None:
    trace = CallTrace(worker.memory, OFFSET, most=100)
    trace.begin()
    worker.call(2)
    worker.take()  # its thread sleeps, or is dead
    worker.call(2)
    trace.read()
    assert numbers(trace) == [0, 1]
    worker.fill(2)
    trace.read()
    assert numbers(trace) == [0, 1, 2, 3, 4]
    worker.take()
    worker.call(1)
    for _ in range(1000):
        trace.read()
    assert numbers(trace) == [0, 1, 2, 3, 4, 6]
    assert trace.missed == 1


def test_after_the_first_ones_calls_are_counted_only(worker: Worker) -> None:
    trace = CallTrace(worker.memory, OFFSET, most=3)
    trace.begin()
    for _ in range(3):
        worker.call(2)
        trace.read()
    assert (numbers(trace), trace.left_out) == ([0, 1, 2], 3)


def test_sends_and_what_makes_no_sense(worker: Worker) -> None:
    trace = CallTrace(worker.memory, OFFSET, most=10)
    trace.begin()
    worker.take(3)
    worker.fill(0, operation=1, peer=0xFFFFFFFF)
    worker.fill(1, operation=77)
    worker.fill(2, operation=0xFFFF, peer=4)
    trace.read()
    told = [(is_transfer, call.operation, call.peer) for _, is_transfer, call in trace.calls(NAMES)]
    assert told == [(True, "send", -1), (True, "recv", 4)]


def test_workers_that_cannot_be_traced(worker: Worker) -> None:
    worker.set_groups(512)
    assert CallTrace(worker.memory, OFFSET, most=1).begin() == (
        "it has 512 groups, but tracing supports at most 511"
    )
    assert worker.until_ns == 0
    worker.set_version(0)
    assert "cannot be traced" in CallTrace(worker.memory, OFFSET, most=1).begin()
