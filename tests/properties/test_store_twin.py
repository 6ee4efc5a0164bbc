"""The native server does what state.py says, byte for byte, for any requests of several clients."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint import _native
from rallypoint.store import wire
from rallypoint.store.state import Close, Send, State
from rallypoint.store.wire import Field, Opcode, Request

CLIENTS = 4
HELLO = wire.encode_request(Request(Opcode.VALIDATE, number=wire.MAGIC))
PROBE = wire.encode_request(Request(Opcode.PING, number=wire.PROBE))


class Twin:
    """The Python server without sockets: parser and state as the native machine joins them."""

    def __init__(self) -> None:
        self.state = State()
        self.parsers: dict[int, wire.Parser] = {}
        self.sent: dict[int, bytes] = {}
        self.closed: set[int] = set()

    def open(self, connection: int) -> None:
        self.state.connect(connection, 0.0)
        self.parsers[connection] = wire.Parser()

    def receive(self, connection: int, data: bytes) -> None:
        try:
            for request in self.parsers[connection].feed(data):
                self._perform(self.state.handle(connection, request))
                if connection in self.closed:
                    return
        except wire.WireError:
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
                data = wire.encode_reply(action.reply, tagged=action.tagged)
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
    for field in wire.LAYOUT[opcode]:
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
            data = wire.encode_request(step)
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
