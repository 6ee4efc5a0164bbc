"""The parser finds the same requests however the bytes are cut, and refuses what is too long."""

from __future__ import annotations

import struct

import pytest
from tests.store_twin.messages import Parser, Request, WireError, encode_request

from rallypoint.store import wire
from rallypoint.store.wire import Opcode

SAMPLES = [
    Request(Opcode.VALIDATE, number=wire.MAGIC),
    Request(Opcode.PING, number=4242),
    Request(Opcode.SET, (b"/k",), (b"value",)),
    Request(Opcode.SET, (b"",), (b"",)),
    Request(Opcode.COMPARE_SET, (b"/k",), (b"old", b"new")),
    Request(Opcode.ADD, (b"/n",), number=-5),
    Request(Opcode.WAIT, (b"/a", b"/b", b"/c")),
    Request(Opcode.CHECK, ()),
    Request(Opcode.NUM_KEYS),
    Request(Opcode.MULTI_SET, (b"/a", b"/b"), (b"1", b"2")),
    Request(Opcode.BARRIER, (b"/bar",), number=3),
    Request(Opcode.ENTER, (b"/job",), number=7),
]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 4096])
def test_cuts_do_not_matter(piece: int) -> None:
    stream = b"".join(map(encode_request, SAMPLES))
    parser = Parser()
    found: list[Request] = []
    for start in range(0, len(stream), piece):
        found += parser.feed(stream[start : start + piece])
    assert found == SAMPLES
    assert parser.buffered == 0


def test_bytes_are_those_of_the_specification() -> None:
    assert encode_request(Request(Opcode.VALIDATE, number=wire.MAGIC)).hex() == "00cef7853c"
    packed = encode_request(Request(Opcode.ADD, (b"/n",), number=-1))
    assert packed == b"\x04" + struct.pack("<Q", 2) + b"/n" + b"\xff" * 8


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x13", "opcode 19"),
        (b"\x03" + struct.pack("<Q", wire.MAX_KEY + 1), "key of 8193"),
        (
            b"\x01" + struct.pack("<Q", 0) + struct.pack("<Q", wire.MAX_VALUE + 1),
            "value of 8388609",
        ),
        (b"\x05" + struct.pack("<Q", wire.MAX_COUNT + 1), "count of 131073"),
        (b"\x0b" + struct.pack("<q", -1), "count of 18446744073709551615"),
    ],
)
def test_announced_lengths_are_refused_before_their_bytes(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        list(Parser().feed(data))
