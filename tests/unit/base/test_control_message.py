"""Agent-worker messages: what is sent is read, the long is shortened, nonsense is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rallypoint.base.control_message import (
    MAX_MESSAGE_BYTES,
    CallTimedOut,
    Hello,
    Known,
    LongWait,
    LostContact,
    Stage,
    UnknownMessage,
    WorkerError,
    WorkerReport,
    decode,
    encode,
    shorten,
)
from rallypoint.base.errors import ControlMessageError

SHORT = st.text(max_size=200)


@given(
    st.builds(Hello, st.integers(1, 2**31 - 1))
    | st.builds(WorkerError, SHORT, SHORT, SHORT, st.floats(0, 1e10), st.booleans())
    | st.builds(LongWait, st.floats(0, 1e10), st.booleans())
    | st.builds(WorkerReport, st.sampled_from(Stage), st.integers(), st.booleans(), st.booleans())
    | st.builds(LostContact, st.integers(), st.integers(), st.booleans())
    | st.builds(CallTimedOut, st.integers(), st.integers(), st.lists(st.integers()).map(tuple))
)
def test_what_is_sent_is_read(message: Known) -> None:
    assert decode(encode(message)) == message


@given(text=st.text(alphabet="a\n\U0001f600\ud800\0\\", min_size=1), repeat=st.integers(1, 20000))
@example(text="\U0001f600", repeat=100_000)
@example(text="x", repeat=10_000_000)
def test_no_message_is_too_long(text: str, repeat: int) -> None:
    long = text * repeat
    packet = encode(WorkerError(long, long, long, 1.0))
    assert len(packet) <= MAX_MESSAGE_BYTES
    assert type(decode(packet)) is WorkerError


def test_a_long_traceback_keeps_both_its_ends() -> None:
    trace = "Traceback\n" + "  deep\n" * 100_000 + "ValueError: why"
    message = decode(encode(WorkerError("ValueError", "why", trace, 1.0)))
    assert isinstance(message, WorkerError)
    assert message.traceback.startswith("Traceback\n  deep")
    assert message.traceback.endswith("ValueError: why")
    assert "characters left out" in message.traceback


@given(st.text(), st.integers(64, 1000))
def test_shorten_keeps_its_limit(text: str, limit: int) -> None:
    assert len(shorten(text, limit)) <= limit
    assert shorten(text, len(text)) == text


@given(st.binary(max_size=400))
def test_hostile_bytes_are_refused_or_read(packet: bytes) -> None:
    try:
        decode(packet)
    except ControlMessageError:
        return


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
KEYS = st.sampled_from(
    ["pid", "type", "message", "traceback", "time", "is_secondary", "reason", "x"]
)


@given(
    kind=st.sampled_from(["hello", "error"]) | JSON,
    fields=st.dictionaries(KEYS, JSON),
)
@pytest.mark.slow
def test_hostile_objects_are_refused_or_read(kind: object, fields: dict[str, object]) -> None:
    packet = json.dumps({"v": 1, "kind": kind, **fields}).encode()
    try:
        message = decode(packet)
    except ControlMessageError:
        return
    if not isinstance(message, UnknownMessage):
        assert isinstance(decode(encode(message)), type(message))


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b"9" * 60_000, "not JSON"),
        (b"1", "not an object"),
        (b"[]", "not an object"),
        (b'{"v": 1}', "not an object with a kind"),
        (b'{"v": 1, "kind": 3}', "not an object with a kind"),
        (b'{"kind": "hello"}', "version None"),
        (b'{"v": 2, "kind": "hello", "pid": 1}', "version 2, but this is version 1"),
        (b'{"v": 1, "kind": "hello"}', "lacks fields"),
        (b'{"v": 1, "kind": "hello", "pid": }', "not JSON"),
        (b'{"v": 1, "kind": "hello", "pid": "1"}', "lacks fields"),
        (b'{"v": 1, "kind": "error", "type": "E"}', "lacks fields"),
        (b"x" * (MAX_MESSAGE_BYTES + 1), "bytes"),
    ],
)
def test_refusals_say_why(packet: bytes, reason: str) -> None:
    with pytest.raises(ControlMessageError, match=reason):
        decode(packet)


@pytest.mark.parametrize("time", ["NaN", "Infinity", "-1", "1e300", "1" + "0" * 400])
def test_an_impossible_time_is_refused(time: str) -> None:
    packet = '{"v":1,"kind":"error","type":"E","message":"","traceback":"","time":' + time + "}"
    with pytest.raises(ControlMessageError, match="lacks fields"):
        decode(packet.encode())


def test_an_unknown_kind_is_passed_over() -> None:
    assert decode(b'{"v": 1, "kind": "progress", "step": 3}') == UnknownMessage("progress")
    assert decode(b'{"v": 1, "kind": "abort", "reason": "why"}') == UnknownMessage("abort")
