"""A sink: order, whole blocks, what is lost is counted, and nobody waits."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator

import pytest

from rallypoint.launch.output.sink import MAX_BYTES, Sink


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for fd in (reading, writing):
        try:
            os.close(fd)
        except OSError:
            continue


def line(number: int) -> bytes:
    return f"{number} ".encode() + b"x" * (number % 5000) + b"\n"


def read_all(fd: int, until: bytes) -> bytes:
    data = b""
    while not data.endswith(until):
        data += os.read(fd, 1 << 16)
    return data


def test_order_and_whole_lines(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    sink = Sink(writing)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(read_all(reading, b"end\n")))
    reader.start()
    for number in range(3000):
        sink.write(line(number))
        if number % 500 == 0:
            assert sink.flush(60)
    sink.write(b"end\n")
    reader.join()
    assert found == [b"".join(map(line, range(3000))) + b"end\n"]
    assert sink.flush(60)
    assert sink.pending == 0


def test_nobody_reads_and_then_somebody_does(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    sink = Sink(writing)
    count = 3 * MAX_BYTES // 2500
    for number in range(count):
        sink.write(line(number))
    assert sink.pending <= MAX_BYTES
    assert not sink.flush(0.05)
    data = read_all(reading, b"nothing read them\n")
    *lines, note = data.splitlines(keepends=True)
    assert lines == [line(number) for number in range(len(lines))]  # a gap, and only at the end
    lost = re.fullmatch(rb"rallypoint: (\d+) bytes of output are missing here.*\n", note)
    assert lost is not None
    assert int(lost[1]) == sum(len(line(number)) for number in range(len(lines), count))
    sink.write(b"again\n")
    assert read_all(reading, b"again\n") == b"again\n"
    assert sink.flush(60)


def test_room_is_told(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    sink = Sink(writing)
    room = sink.tell_room(1000)
    sink.write(b"x" * 300_000)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(room)
    got = 0
    while got < 300_000:
        got += len(os.read(reading, 1 << 16))
    assert sink.flush(60)
    assert os.eventfd_read(room) == 1
    sink.forget_room()


def test_a_reader_that_is_gone(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.close(reading)
    sink = Sink(writing)
    sink.write(b"x\n")
    assert sink.flush(60)
    assert sink.is_broken
    assert sink.error is not None
    sink.write(b"y\n")
    assert sink.pending == 0


def test_a_full_device_may_have_room_later() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    sink = Sink(fd)
    sink.write(b"x\n")
    assert sink.flush(60)
    assert sink.error is not None
    assert not sink.is_broken
    assert sink.pending == 0
    os.close(fd)


def test_a_descriptor_that_does_not_block(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    sink = Sink(writing)
    sink.write(b"x" * 300_000 + b"\n")
    assert read_all(reading, b"\n") == b"x" * 300_000 + b"\n"
    assert sink.flush(60)
