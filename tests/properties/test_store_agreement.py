"""Several clients, any requests: our server, PyTorch's, state.py and a dictionary agree.

They do where the stock wire is defined and PyTorch's server is sound. Left out are its known
faults: pushes to queues that somebody waits for, waits that name a non-empty queue, and waits
released by a COMPARE_SET that stored nothing.
"""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.store_twin.messages import Request, encode_request
from tests.store_twin.state import Send, State

from rallypoint.store import wire
from rallypoint.store.server import StoreServer
from rallypoint.store.wire import Opcode

CLIENTS = 3
WAITABLE = ("a", "b", "c")
VALUES = st.one_of(st.binary(max_size=3), st.sampled_from([b"5", b"-1"]))


class Peer:
    """Raw connections to one server, which say after each step what came on each of them."""

    def __init__(self, port: int) -> None:
        self.sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS)]
        for sock in self.sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(200)
            sock.sendall(encode_request(Request(Opcode.VALIDATE, number=wire.MAGIC)))

    def step(self, client: int, data: bytes, nonce: int) -> list[bytes]:
        self.sockets[client].sendall(data)
        ping = encode_request(Request(Opcode.PING, number=nonce))
        order = [client, *(c for c in range(CLIENTS) if c != client)]
        found = [b""] * CLIENTS
        for c in order:
            self.sockets[c].sendall(ping)
            while not found[c].endswith(wire.u32(nonce)):
                more = self.sockets[c].recv(65536)
                assert more, "the server closed a connection"
                found[c] += more
        return found

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


class Definition:
    """state.py in the same role."""

    def __init__(self) -> None:
        self.state = State()
        for client in range(CLIENTS):
            self.state.connect(client, 0.0)
            self.state.handle(client, Request(Opcode.VALIDATE, number=wire.MAGIC))

    def step(self, client: int, request: Request, nonce: int) -> list[bytes]:
        found = [b""] * CLIENTS
        for action in self.state.handle(client, request):
            assert isinstance(action, Send)
            found[action.connection] += action.reply.body
        return [data + wire.u32(nonce) for data in found]


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[list[Peer], Definition, Iterator[int]]]:
    import torch.distributed as torch_dist

    torch_server = torch_dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60))
    with StoreServer(log_fd=-1) as ours:
        peers = [Peer(ours.port), Peer(torch_server.port)]
        yield peers, Definition(), itertools.count(1 << 24)
        for peer in peers:
            peer.close()


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, Opcode, list[str], list[bytes], int]:
    opcode = draw(
        st.sampled_from(
            [o for o in Opcode if o < Opcode.WAIT_GET and o not in {Opcode.VALIDATE, Opcode.PING}]
        )
    )
    names: list[str] = []
    values: list[bytes] = []
    number = draw(st.integers(-3, 3))
    match opcode:
        case Opcode.WAIT | Opcode.CHECK | Opcode.MULTI_GET:
            names = draw(st.lists(st.sampled_from(WAITABLE), max_size=3, unique=True))
        case Opcode.MULTI_SET:
            names = draw(st.lists(st.sampled_from(WAITABLE), max_size=3))
            values = [draw(VALUES) for _ in names]
        case Opcode.COMPARE_SET:
            names, values = ["d"], [draw(VALUES), draw(VALUES)]
        case Opcode.ADD:
            names = ["n"]
        case Opcode.BARRIER:
            names = ["barrier"]
            number = draw(st.integers(1, 3))
        case Opcode.QUEUE_PUSH | Opcode.QUEUE_POP | Opcode.QUEUE_LEN:
            names = ["q"]
            values = [draw(VALUES)] if opcode is Opcode.QUEUE_PUSH else []
        case Opcode.SET | Opcode.APPEND:
            names, values = [draw(st.sampled_from(WAITABLE))], [draw(VALUES)]
        case Opcode.GET | Opcode.DELETE_KEY:
            names = [draw(st.sampled_from((*WAITABLE, "d", "n")))]
    return draw(st.integers(0, CLIENTS - 1)), opcode, names, values, number


@pytest.mark.needs_torch
@given(plan=st.lists(steps(), max_size=25))
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_all_agree(
    world: tuple[list[Peer], Definition, Iterator[int]],
    plan: list[tuple[int, Opcode, list[str], list[bytes], int]],
) -> None:
    peers, definition, nonces = world
    example = next(nonces)
    model: dict[bytes, bytes] = {}
    waiting: set[int] = set()

    def perform(client: int, request: Request) -> list[bytes]:
        nonce = next(nonces)
        expected = definition.step(client, request, nonce)
        for peer in peers:
            found = peer.step(client, encode_request(request), nonce)
            if request.opcode is Opcode.LIST_KEYS:
                assert sorted(found[client]) == sorted(expected[client])
            else:
                assert found == expected, (peers.index(peer), request)
        return [data[:-4] for data in expected]

    for client, opcode, names, values, number in plan:
        if client in waiting and opcode is not Opcode.CANCEL_WAIT:
            continue
        keys = tuple(f"/{example}/{name}".encode() for name in names)
        request = Request(opcode, keys, tuple(values), number)
        replies = perform(client, request)
        check_model(model, request, replies[client])
        if opcode in {Opcode.WAIT, Opcode.BARRIER}:
            waiting.add(client)
        waiting -= {c for c, reply in enumerate(replies) if reply}
    for client in waiting:
        perform(client, Request(Opcode.CANCEL_WAIT))


def check_model(model: dict[bytes, bytes], request: Request, reply: bytes) -> None:
    """A dictionary, and what the replies must be by it."""
    match request.opcode:
        case Opcode.SET:
            model[request.key] = request.value
        case Opcode.APPEND:
            model[request.key] = model.get(request.key, b"") + request.value
        case Opcode.MULTI_SET:
            model.update(zip(request.keys, request.values, strict=True))
        case Opcode.ADD:
            total = int(model.get(request.key, b"0")) + request.number
            model[request.key] = b"%d" % total
            assert reply == struct.pack("<q", total)
        case Opcode.GET | Opcode.MULTI_GET:
            assert reply == b"".join(wire.blob(model.get(key, b"")) for key in request.keys)
        case Opcode.CHECK:
            assert reply == (b"\0" if all(key in model for key in request.keys) else b"\1")
        case Opcode.WAIT if all(key in model for key in request.keys):
            assert reply == b"\0"
        case Opcode.DELETE_KEY:
            assert reply == struct.pack("<q", model.pop(request.key, None) is not None)
        case Opcode.COMPARE_SET:
            expected, wanted = request.values
            now = model.get(request.key)
            if (now is None and not expected) or now == expected:
                now = model[request.key] = wanted
            assert reply == wire.blob(expected if now is None else now)
        case Opcode.BARRIER:
            model[request.key] = b"%d" % (int(model.get(request.key, b"0")) + 1)
