"""The native server answers as tests/store_twin/state.py does, byte for byte.

For any requests of several clients, and for hostile bytes, which it survives.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store_twin.messages import (
    LAYOUT,
    Field,
    Parser,
    Request,
    WireError,
    encode_reply,
    encode_request,
)
from tests.store_twin.state import Close, Send, State

from rallypoint import _native
from rallypoint.store import wire
from rallypoint.store.wire import Opcode

CLIENTS = 4
HELLO = encode_request(Request(Opcode.VALIDATE, number=wire.MAGIC))
PROBE = encode_request(Request(Opcode.PING, number=wire.PROBE))


class Twin:
    """The Python server without sockets: parser and state as the native machine joins them."""

    def __init__(self) -> None:
        self.state = State()
        self.parsers: dict[int, Parser] = {}
        self.sent: dict[int, bytes] = {}
        self.closed: set[int] = set()

    def open(self, connection: int) -> None:
        self.state.connect(connection, 0.0)
        self.parsers[connection] = Parser()

    def receive(self, connection: int, data: bytes) -> None:
        try:
            for request in self.parsers[connection].feed(data):
                self._perform(self.state.handle(connection, request))
                if connection in self.closed:
                    return
        except WireError:
            self.closed.add(connection)
            self._perform(self.state.disconnect(connection))

    def close(self, connection: int) -> None:
        self.closed.add(connection)
        self._perform(self.state.disconnect(connection))

    def _perform(self, actions: list[Send | Close]) -> None:
        for action in actions:
            if isinstance(action, Close):
                self.closed.add(action.connection)
            else:
                data = encode_reply(action.reply, tagged=action.tagged)
                self.sent[action.connection] = self.sent.get(action.connection, b"") + data

    def take_output(self) -> dict[int, bytes]:
        sent, self.sent = self.sent, {}
        return sent


KEYS = st.sampled_from([b"/a", b"/b", b"/q", b"init/"])
VALUES = st.one_of(
    st.sampled_from(
        [b"", b"1", b"-7", b" +12abc", b"abc", b"+-1", b"9223372036854775807", b"0" * 30]
    ),
    st.binary(max_size=4),
    st.integers(0, 255).map(lambda n: bytes([n]) * 3000),  # sent by reference
)
NUMBERS = st.one_of(st.integers(-3, 5), st.integers(-(2**63), 2**63 - 1))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    opcode = draw(st.sampled_from([o for o in Opcode if o is not Opcode.VALIDATE]))
    keys: list[bytes] = []
    values: list[bytes] = []
    number = 0
    for field in LAYOUT[opcode]:
        match field:
            case Field.KEY:
                keys.append(draw(KEYS))
            case Field.VALUE:
                values.append(draw(VALUES))
            case Field.NUMBER:
                number = draw(NUMBERS)
            case Field.NONCE:
                number = draw(st.sampled_from([1, wire.PROBE]))
            case Field.KEYS:
                keys = draw(st.lists(KEYS, max_size=4))
            case Field.PAIRS:
                keys = draw(st.lists(KEYS, max_size=3))
                values = [draw(VALUES) for _ in keys]
    return Request(opcode, tuple(keys), tuple(values), number)


STEPS = st.lists(
    st.tuples(st.integers(0, CLIENTS - 1), st.one_of(requests(), st.just("close"))), max_size=40
)


@given(steps=STEPS, tagged=st.sets(st.integers(0, CLIENTS - 1)), piece=st.integers(1, 40))
@settings(max_examples=1500, deadline=None)
def test_native_agrees_with_definition(
    steps: list[tuple[int, Request | str]], tagged: set[int], piece: int
) -> None:
    native, twin = _native.StoreMachine(), Twin()
    ids = [native.open(0.0) for _ in range(CLIENTS)]
    for client, connection in enumerate(ids):
        twin.open(connection)
        greeting = HELLO + (PROBE if client in tagged else b"")
        assert native.receive(connection, greeting) is None
        twin.receive(connection, greeting)
    for client, step in steps:
        connection = ids[client]
        if connection in twin.closed:
            continue
        if isinstance(step, str):
            native.close(connection)
            twin.close(connection)
        else:
            data = encode_request(step)
            for start in range(0, len(data), piece):
                chunk = data[start : start + piece]
                reason = native.receive(connection, chunk)
                twin.receive(connection, chunk)
                assert (reason is not None) == (connection in twin.closed), (step, reason)
                if reason is not None:
                    native.close(connection)
                    break
        ours = {c: data for c, data in native.take_output() if c not in twin.closed}
        theirs = {c: data for c, data in twin.take_output().items() if c not in twin.closed}
        if isinstance(step, Request) and step.opcode in {Opcode.LIST_KEYS, Opcode.WATCH}:
            # These have no order; with the same keys and values they have the same bytes.
            ours, theirs = ({c: bytes(sorted(d)) for c, d in x.items()} for x in (ours, theirs))
        assert ours == theirs


CASES = 100_000
COMPARED = 5_000

VALID = [
    encode_request(request)
    for request in (
        Request(Opcode.SET, (b"/k",), (b"value",)),
        Request(Opcode.COMPARE_SET, (b"/k",), (b"", b"new")),
        Request(Opcode.ADD, (b"/n",), number=3),
        Request(Opcode.WAIT, (b"/a", b"/b")),
        Request(Opcode.MULTI_SET, (b"/a", b"/b"), (b"1", b"2")),
        Request(Opcode.MULTI_GET, (b"/a", b"/b")),
        Request(Opcode.BARRIER, (b"/barrier",), number=2),
        Request(Opcode.QUEUE_PUSH, (b"/q",), (b"item",)),
        Request(Opcode.QUEUE_POP, (b"/q",)),
        Request(Opcode.CANCEL_WAIT),
        Request(Opcode.WAIT_GET, (b"/a", b"/k")),
        Request(Opcode.QUEUE_TAKE, (b"/q",)),
        Request(Opcode.SET_EPHEMERAL, (b"/e",), (b"mine",)),
        Request(Opcode.ENTER, (b"/job",), number=1),
    )
]


def hostile(chance: random.Random) -> list[bytes]:
    """A stream, in pieces: valid requests with some bytes changed, cut, doubled, or pure noise."""
    if chance.random() < 0.1:
        stream = bytearray(chance.randbytes(chance.randrange(1, 100)))
    else:
        stream = bytearray(HELLO + (PROBE if chance.random() < 0.7 else b""))
        for _ in range(chance.randrange(1, 6)):
            stream += chance.choice(VALID)
        for _ in range(chance.randrange(0, 4)):
            place = chance.randrange(len(stream))
            match chance.randrange(3):
                case 0:
                    stream[place] = chance.randrange(256)
                case 1:
                    del stream[place : place + chance.randrange(1, 9)]
                case _:
                    stream[place:place] = stream[place : place + chance.randrange(1, 20)]
            if not stream:
                stream += b"\0"
    pieces = []
    while stream:
        size = chance.randrange(1, len(stream) + 1)
        pieces.append(bytes(stream[:size]))
        del stream[:size]
    return pieces


def test_native_survives_and_serves_others(seed: int) -> None:
    chance = random.Random(seed)
    machine = _native.StoreMachine()
    bystander = machine.open(0.0)
    assert machine.receive(bystander, HELLO) is None
    add = encode_request(Request(Opcode.ADD, (b"/bystander",), number=1))
    for case in range(1, CASES + 1):
        connection = machine.open(0.0)
        for piece in hostile(chance):
            if machine.receive(connection, piece) is not None:
                break
        machine.take_output()
        if case % 10 == 0:
            assert machine.receive(bystander, add) is None
            assert (bystander, wire.i64(case // 10)) in machine.take_output(), case
        machine.close(connection)


def test_native_judges_as_the_definition_does(seed: int) -> None:
    chance = random.Random(seed)
    native, twin = _native.StoreMachine(), Twin()
    for case in range(COMPARED):
        connection = native.open(0.0)
        twin.open(connection)
        twin.closed.discard(connection)
        for piece in hostile(chance):
            reason = native.receive(connection, piece)
            twin.receive(connection, piece)
            assert (reason is not None) == (connection in twin.closed), (case, reason)
            if reason is not None:
                break
        ours = dict(native.take_output())
        theirs = twin.take_output()
        if connection not in twin.closed:
            assert _unordered(ours.get(connection)) == _unordered(theirs.get(connection)), case
            twin.close(connection)
            twin.take_output()
        native.close(connection)
        native.take_output()


def _unordered(data: bytes | None) -> list[int]:
    """LIST_KEYS and WATCH have no order, and one piece may hold several requests."""
    return sorted(data or b"")
