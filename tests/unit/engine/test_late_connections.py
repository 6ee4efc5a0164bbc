"""Connections that are made when they are needed: who gets in, and which call stands if both call.

The peer is the test itself, which proves itself as formation/mesh.py does.
"""

from __future__ import annotations

import gc
import hmac
import os
import random
import re
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from rallypoint._native import region_bytes
from rallypoint.engine.communicator import Communicator, FarPeer, LateMesh
from rallypoint.process_group.formation.mesh import GREETING, Pass
from rallypoint.store.token import NONCE, PROOF, client_proof, server_proof
from tests.conftest import need_ipv6
from tests.unit.engine.ranks import planner

PASS = Pass("run/0/0", b"s" * 32, b"token")
MAIL, DATA = 1, 2
HEAD = struct.Struct("<II")


class Late:
    """A rank of two, and all that the other one holds: a listener and a control connection."""

    def __init__(self, rank: int, address: str = "127.0.0.1", called_at: str = "") -> None:
        self.rank, self.peer = rank, 1 - rank
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address.partition("%")[0], 0), family=family)
        self.listener.settimeout(200)
        theirs = socket.create_server(("127.0.0.1", 0))
        theirs.setblocking(False)
        self.address = theirs.getsockname()
        self.control, control = socket.socketpair()
        fd = os.memfd_create("test")
        os.ftruncate(fd, region_bytes(2))
        self.communicator = Communicator(
            fd,
            rank=rank,
            ranks=2,
            plan=planner(rank, 2, "", None),
            timeout_s=200,
            spins=0,
            yields=10,
            peers=[FarPeer(self.peer, 4711, -1, -1, [])],
            mesh=LateMesh(
                theirs.detach(),
                PASS.group_secret,
                PASS.name,
                1,
                "",
                "",
                200,
                [(self.peer, called_at or address, self.listener.getsockname()[1])],
                [(self.peer, control.detach())],
            ),
        )
        os.close(fd)
        self.send = threading.Thread(target=self.communicator.send, args=(self.peer, 5, np.ones(1)))

    def called(self) -> tuple[socket.socket, int, bytes]:
        """Somebody who calls us: what for, and the random bytes that are to be signed."""
        sock, _ = self.listener.accept()
        sock.settimeout(200)
        greeting = receive(sock, len(GREETING) + HEAD.size + NONCE)
        assert greeting.startswith(GREETING)
        caller, purpose = HEAD.unpack_from(greeting, len(GREETING))
        assert caller == self.rank
        return sock, purpose, greeting[len(GREETING) + HEAD.size :]

    def greet(self, purpose: int, admission: Pass = PASS) -> tuple[socket.socket, bytes, bytes]:
        """A call of ours, what remains to be sent, and what must come then."""
        sock = socket.create_connection(self.address)
        sock.settimeout(200)
        ours = os.urandom(NONCE)
        sock.sendall(GREETING + HEAD.pack(self.peer, purpose) + ours)
        theirs = receive(sock, NONCE)
        key = admission.key(self.peer, self.rank, purpose)
        return sock, client_proof(key, ours, theirs), server_proof(key, ours, theirs)

    def get_in(self, purpose: int) -> socket.socket:
        """A call of ours that stands."""
        sock, proof, expected = self.greet(purpose)
        try:
            sock.sendall(proof)
            if receive(sock, PROOF) != expected:
                raise ConnectionError
        except ConnectionError:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        self.communicator.abort()
        if self.send.is_alive():
            self.send.join(200)
        self.communicator.leave()
        self.control.close()
        self.listener.close()


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """For this process, until the end of the block."""
    gc.collect()  # so that nothing closes one meanwhile
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def late(rank: int) -> Iterator[Late]:
    made = Late(rank)
    yield made
    made.close()


def test_it_calls_when_it_has_something_to_send(late: Late) -> None:
    """For mail and data, as there is a control connection; and again, if it is refused."""
    late.send.start()
    refused, purpose, _ = late.called()
    refused.close()
    purposes: set[int] = set()
    socks = []
    while purposes != {MAIL, DATA}:
        sock, purpose, theirs = late.called()
        ours, key = os.urandom(NONCE), PASS.key(late.rank, late.peer, purpose)
        sock.sendall(ours)
        proof = receive(sock, PROOF)
        assert hmac.compare_digest(proof, client_proof(key, theirs, ours))
        sock.sendall(server_proof(key, theirs, ours))
        purposes.add(purpose)
        socks.append((purpose, sock))
    late.send.join(200)
    mail = next(sock for purpose, sock in socks if purpose == MAIL)
    assert receive(mail, 4) == b"RLPM"
    for _, sock in socks:
        sock.close()


@pytest.mark.parametrize(
    ("called_at", "why"),
    [
        ("nowhere", "Invalid argument"),
        # All hosts of a network, to which there are no connections.
        ("255.255.255.255", "Permission denied|Network is unreachable"),
    ],
)
def test_an_address_that_cannot_be_called_is_the_peers(rank: int, called_at: str, why: str) -> None:
    late = Late(rank, called_at=called_at)
    late.send.start()
    late.send.join(200)
    assert not late.send.is_alive()
    error = late.communicator.error("send")
    assert error.rank == late.peer
    assert re.search(why, str(error))
    late.close()


def test_strangers_beyond_a_number_are_turned_away(late: Late) -> None:
    """And those who belong get in when the strangers have gone."""
    strangers = []
    for _ in range(500):
        stranger = socket.create_connection(late.address)
        stranger.settimeout(200)
        strangers.append(stranger)
        answer = b""
        with suppress(ConnectionError):
            stranger.sendall(GREETING + HEAD.pack(late.peer, MAIL) + bytes(NONCE))
            answer = receive(stranger, 1)
        if not answer:
            break
    assert 10 < len(strangers) < 500
    for stranger in strangers:
        stranger.close()
    late.send.start()
    socks: list[socket.socket] = []
    while len(socks) < 2:  # those that have gone may still count
        with suppress(ConnectionError):
            socks.append(late.get_in((MAIL, DATA)[len(socks)]))
    late.send.join(200)
    for sock in socks:
        sock.close()


def test_callers_wait_while_there_are_no_descriptors(late: Late) -> None:
    sock = socket.socket()
    with no_descriptors_left():
        sock.connect(late.address)
        sock.sendall(GREETING + HEAD.pack(late.peer, MAIL) + bytes(NONCE))
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
    sock.settimeout(200)
    assert len(receive(sock, NONCE)) == NONCE
    sock.close()


def test_an_address_may_name_its_link() -> None:
    """As fe80::1%eth0 does; the loopback interface is number 1 on every machine."""
    need_ipv6()
    late = Late(0, "::1%1")
    late.send.start()
    sock, purpose, _ = late.called()
    assert purpose in (MAIL, DATA)
    sock.close()
    late.close()


def test_a_lack_of_descriptors_may_pass(late: Late) -> None:
    with no_descriptors_left():
        late.send.start()
        late.send.join(0.1)
        assert late.send.is_alive()
    for _ in range(2):
        sock, _, _ = late.called()
        sock.close()


@pytest.mark.long
def test_a_rank_without_descriptors_blames_itself(late: Late) -> None:
    """And not the rank that it cannot call."""
    with no_descriptors_left():
        late.send.start()
        late.send.join(200)
    assert not late.send.is_alive()
    error = late.communicator.error("send")
    assert error.rank == late.rank
    assert re.match(
        rf"the system refused rank {late.rank} .*\(Too many open files\) during send; .*ulimit -n",
        str(error),
    ), error


def test_only_those_who_know_the_secret_get_in(late: Late, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        with socket.create_connection(late.address) as stranger, suppress(ConnectionError):
            stranger.sendall(GREETING * rng.randrange(2) + rng.randbytes(rng.randrange(200)))
    for other in (
        Pass("run/1/0", PASS.secret, PASS.token),
        Pass(PASS.name, b"t" * 32, PASS.token),
        Pass(PASS.name, PASS.secret, b""),
    ):
        sock, proof, _ = late.greet(MAIL, other)
        sock.sendall(proof)
        with sock, suppress(ConnectionResetError):
            assert receive(sock, PROOF) == b""
    for purpose in (MAIL, DATA):
        sock, proof, expected = late.greet(purpose)
        sock.sendall(proof)
        assert receive(sock, PROOF) == expected
        if purpose == MAIL:
            mail = sock
    late.send.start()
    late.send.join(200)
    assert receive(mail, 4) == b"RLPM"
    mail.close()
    sock.close()


def test_who_has_not_proved_itself_gives_way(late: Late) -> None:
    late.send.start()
    calls = [late.called() for _ in range(2)]
    socks = []
    for purpose in (MAIL, DATA):
        sock, proof, expected = late.greet(purpose)
        sock.sendall(proof)
        assert receive(sock, PROOF) == expected
        socks.append(sock)
    late.send.join(200)
    for sock in [*socks, *(sock for sock, *_ in calls)]:
        sock.close()


def test_of_two_that_have_the_higher_ranks_call_stands(late: Late) -> None:
    late.send.start()
    socks = []
    for _ in range(2):
        theirs, purpose, nonce = late.called()
        ours, key = os.urandom(NONCE), PASS.key(late.rank, late.peer, purpose)
        theirs.sendall(ours)
        receive(theirs, PROOF)
        sock, proof, expected = late.greet(purpose)
        sock.sendall(proof)
        with suppress(ConnectionResetError):
            answer = b""
            answer = receive(sock, PROOF)
        assert answer == (b"" if late.rank > late.peer else expected)
        if not answer:
            theirs.sendall(server_proof(key, nonce, ours))
        socks += [theirs, sock]
    late.send.join(200)
    assert not late.send.is_alive()
    for sock in socks:
        sock.close()
