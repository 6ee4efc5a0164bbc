"""A peer on another host whose bytes are wrong, too few, or none: an error, no crash and no hang.

The peer is the test itself, with the other ends of the connections in its hands.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rallypoint._native import region_bytes
from rallypoint.base.errors import PeerError, PeerLostError
from rallypoint.engine.communicator import FAILED, Communicator, FarPeer
from rallypoint.schedule.program import Collective
from tests.unit.engine.ranks import begin, planner, sleeps

WIRE, MAIL, CONTROL = b"RLPW", b"RLPM", b"RLPC"


class Peer:
    """Rank 1's ends, and rank 0 whole."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        self.control, self.mail, self.data = (ours for ours, _ in pairs)
        control, mail, data = (theirs.detach() for _, theirs in pairs)
        fd = os.memfd_create("test")
        os.ftruncate(fd, region_bytes(2))
        self.rank0 = Communicator(
            fd,
            rank=0,
            ranks=2,
            plan=planner(0, 2, "", None),
            timeout_s=200,
            spins=0,
            yields=10,
            peers=[FarPeer(1, 4711, control, mail, [data])],
        )
        os.close(fd)

    def close(self) -> None:
        for each in (self.control, self.mail, self.data):
            each.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def all_reduce(communicator: Communicator) -> bool:
    """Whether it fails; `receive` the same."""
    array = np.ones(1000)
    return communicator.run(Collective.ALL_REDUCE, 0, 0, array, array) != 0


def receive(communicator: Communicator) -> bool:
    return communicator.receive(1, 5, np.ones(1)) <= FAILED


def fails(peer: Peer, call: Callable[[Communicator], bool], act: Callable[[], object]) -> PeerError:
    """The error of a call that waits when the peer acts."""
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(call(peer.rank0)))
    thread.start()
    assert thread.native_id is not None
    while thread.is_alive() and not sleeps(thread.native_id):
        time.sleep(0.001)
    act()
    thread.join()
    assert outcome == [True]
    error = peer.rank0.error("the call")
    assert error.rank == 1
    return error


def wire(lane: int = 0, sequence: int = 1, nbytes: int = 8, magic: bytes = WIRE) -> bytes:
    return magic + struct.pack("<IQQQ", lane, sequence, 0, nbytes)


def mail(
    kind: int = 1, slot: int = 0, dtype: int = 1, nbytes: int = 8, taken: int = 0, sequence: int = 1
) -> bytes:
    return MAIL + struct.pack("<BBBBQQQiI", kind, slot, 0, dtype, sequence, 0, nbytes, 0, taken)


BAD_DATA = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n" + bytes(100),
    "another magic": wire(magic=b"XXXX"),
    "a lane that is none": wire(lane=4),
    "too long": wire(nbytes=1 << 40),
    "no number": wire(sequence=0),
}
BAD_MAIL = {
    "another magic": b"XXXX" + bytes(36),
    "a place that is none": mail(slot=32),
    "a kind that is none": mail(kind=9),
    "a dtype that is none": mail(dtype=99),
    "half an item": mail(nbytes=9),
    "a part nobody asked for": mail(kind=3, nbytes=1 << 20),
    "a request for nothing": mail(kind=2),
    "taken, what was not sent": mail(kind=4, taken=1),
    "a place in use": mail() + bytes(8) + mail(),
}
BAD_CONTROL = {
    "another magic": b"XXXX" + bytes(12),
    "too long": CONTROL + struct.pack("<HHQ", 2, 60_000, 0),
    "a kind that is none": CONTROL + struct.pack("<HHQ", 77, 0, 0),
    "trouble that is none": CONTROL + struct.pack("<HHQ", 2, 10, 0) + bytes(10),
    "a probe of nobody": CONTROL + struct.pack("<HHQQiI", 5, 16, 1, 0, 0, 0),
    "a probe by somebody else": CONTROL + struct.pack("<HHQQiIIIiI", 5, 32, 1, 0, 0, 1, 0, 0, 0, 0),
    "a record that is none": CONTROL + struct.pack("<HHQ", 4, 48, 5) + b"\xff" * 48,
}


@pytest.mark.parametrize("what", BAD_DATA)
def test_data_that_makes_no_sense(peer: Peer, what: str) -> None:
    error = fails(peer, all_reduce, lambda: peer.data.sendall(BAD_DATA[what]))
    assert "invalid message" in str(error)


@pytest.mark.parametrize("what", BAD_MAIL)
def test_mail_that_makes_no_sense(peer: Peer, what: str) -> None:
    error = fails(peer, receive, lambda: peer.mail.sendall(BAD_MAIL[what]))
    assert "invalid message" in str(error)


@pytest.mark.parametrize("what", BAD_CONTROL)
def test_control_messages_that_make_no_sense(peer: Peer, what: str) -> None:
    """Then the peer counts as lost."""
    error = fails(peer, all_reduce, lambda: peer.control.sendall(BAD_CONTROL[what]))
    assert isinstance(error, PeerLostError)


@pytest.mark.parametrize("call", [all_reduce, receive])
@pytest.mark.parametrize("count", [0, 1, 17, 31])
def test_a_connection_that_ends_in_a_header(
    peer: Peer, call: Callable[[Communicator], bool], count: int
) -> None:
    def act() -> None:
        peer.data.sendall(wire()[:count])
        peer.mail.sendall(mail()[:count])
        peer.close()

    assert isinstance(fails(peer, call, act), PeerLostError)


def test_a_connection_that_ends_in_a_payload(peer: Peer) -> None:
    def act() -> None:
        peer.data.sendall(wire(nbytes=8000) + bytes(5000))
        peer.close()

    assert isinstance(fails(peer, all_reduce, act), PeerLostError)


def test_only_the_data_connection_ends(peer: Peer) -> None:
    error = fails(peer, all_reduce, lambda: peer.data.close())
    assert isinstance(error, PeerLostError)


def test_only_the_mail_connection_ends(peer: Peer) -> None:
    error = fails(peer, receive, lambda: peer.mail.close())
    assert isinstance(error, PeerLostError)


@pytest.mark.parametrize("place", ["data", "mail", "control"])
def test_random_bytes(place: str, seed: int) -> None:
    """Also such that begin well."""
    rng = random.Random(seed)
    for _ in range(30):
        peer = Peer()
        start = {"data": WIRE, "mail": MAIL, "control": CONTROL}[place]
        noise = (start if rng.random() < 0.8 else b"") + rng.randbytes(rng.randrange(1, 5000))

        def act(peer: Any = peer, noise: bytes = noise) -> None:
            getattr(peer, place).sendall(noise)
            peer.close()

        fails(peer, receive if place == "mail" else all_reduce, act)
        peer.close()


def test_a_peer_that_reads_nothing_ends_in_a_timeout(peer: Peer) -> None:
    """Far more than the connection holds."""
    array = np.ones(10_000_000)
    work = begin(peer.rank0, Collective.ALL_REDUCE, 0, 0, array, array, timeout_s=0.3)
    with pytest.raises(PeerError, match=r"waited 0.3 s for rank 1"):
        work.wait()
