"""Requests as bytes, and what cannot be sent; the parser finds them however the bytes are cut, and
refuses what is too long."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from tests.store_twin.messages import Parser, Request, WireError, encode_request

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.store import wire
from rallypoint.store.wire import Opcode, pack_count, pack_key, pack_keys, pack_number, pack_value

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


def blob(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def test_requests_as_bytes() -> None:
    assert pack_key("a") == blob(b"/a")
    assert pack_keys(["a", "\u00e9"]) == struct.pack("<Q", 2) + blob(b"/a") + blob(b"/\xc3\xa9")
    assert pack_value("a", "\u00e9") == blob(b"\xc3\xa9")
    assert pack_value("a", b"\xff") == blob(b"\xff")
    assert pack_number("add", -2) == b"\xfe" + b"\xff" * 7


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda: pack_key(7), "a store's keys are str, not int: 7"),
        (lambda: pack_key("k" * wire.MAX_KEY), f"has at most {wire.MAX_KEY - 1} bytes, not"),
        (lambda: pack_keys("abc"), "expected a list of keys, not the single key 'abc'"),
        (lambda: pack_count(range(wire.MAX_COUNT + 1)), f"at most {wire.MAX_COUNT} keys, not"),
        (lambda: pack_value("a", 7), "values are str or bytes, not int"),  # type: ignore[arg-type]
        (lambda: pack_number("add", 1 << 63), "add takes a 64-bit integer, not 9223372036854775"),
        (lambda: pack_number("add", "x"), "integer, not 'x'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_sent(pack: Callable[[], object], message: str) -> None:
    with pytest.raises((InvalidArgumentError, InvalidTypeError)) as raised:
        pack()
    assert message in str(raised.value)


def test_a_value_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_VALUE", 3)
    with pytest.raises(InvalidArgumentError, match="the value of 'a' has 4 bytes, but a store acc"):
        pack_value("a", b"four")
