"""Connections between ranks on different hosts: who gets in, who does not, and who is told what."""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from rallypoint.base.errors import CollectiveTimeoutError, HostError, PeerLostError
from rallypoint.engine.communicator import FarPeer
from rallypoint.process_group.formation import mesh
from rallypoint.process_group.formation.connecting import _MOST_STREAMS as MOST_STREAMS
from rallypoint.process_group.formation.host_network import Congestion, NetworkDiagnosis
from rallypoint.process_group.formation.mesh import GREETING, Mesh, Pass, RankAddress, listen
from tests.ports import reserved_port

CONGESTION = Congestion({})
PASS = Pass("run/0/0", b"s" * 32, b"token")


class Clock:
    """The time, which a test can advance."""

    def __init__(self) -> None:
        self.by_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.by_s


clock = Clock()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not get its turn is no stranger, and time is up only when a test says so."""
    monkeypatch.setattr(mesh, "_STRANGER_S", 600.0)
    monkeypatch.setattr(mesh, "time", clock)
    monkeypatch.setattr(clock, "by_s", 0.0)


def new_mesh(listener: socket.socket, rank: int, members: Sequence[int], admission: Pass) -> Mesh:
    return Mesh(
        listener,
        rank=rank,
        members=members,
        admission=admission,
        congestion=CONGESTION,
        deadline=clock.monotonic() + 200,
        check=lambda: None,
        diagnosis=NetworkDiagnosis(),
    )


def connect_ranks(
    count: int,
    *,
    passes: Sequence[Pass] = (),
    streams: int = 2,
    before: Callable[[dict[int, RankAddress]], Any] = lambda _: None,
) -> list[Any]:
    """Connect ranks as threads; for each, its peers or its error.

    The lowest, which calls nobody, waits in vain for others that have failed: until time is up.
    """
    listeners = [listen("127.0.0.1", CONGESTION) for _ in range(count)]
    places = {
        rank: RankAddress("127.0.0.1", each.getsockname()[1], 100 + rank)
        for rank, each in enumerate(listeners)
    }
    before(places)
    outcomes: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            others = {peer: place for peer, place in places.items() if peer != rank}
            members = range(10, 10 + count)
            admission = passes[rank] if passes else PASS
            made = new_mesh(listeners[rank], rank, members, admission)
            outcomes[rank] = made.connect_all(others, streams)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    if any(isinstance(each, Exception) for each in outcomes[1:]):
        clock.by_s = 1000.0
        with suppress(OSError):  # which wakes it
            socket.create_connection((places[0].address, places[0].port)).close()
    threads[0].join()
    return outcomes


def check_and_close(outcomes: list[list[FarPeer]]) -> None:
    """Each connection leads to the same purpose of the right rank."""
    ends: dict[tuple[int, int, int], socket.socket] = {}
    for rank, peers in enumerate(outcomes):
        assert isinstance(peers, list), peers
        assert [peer.rank for peer in peers] == [r for r in range(len(outcomes)) if r != rank]
        for peer in peers:
            assert peer.pid == 100 + peer.rank
            for purpose, fd in enumerate([peer.control, peer.mail, *peer.data]):
                ends[rank, peer.rank, purpose] = socket.socket(fileno=fd)
    for (rank, other, purpose), sock in ends.items():
        sock.setblocking(True)
        sock.sendall(bytes([rank, other, purpose]))
    for (rank, other, purpose), sock in ends.items():
        assert sock.recv(3) == bytes([other, rank, purpose])
    for sock in ends.values():
        sock.close()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_everybody_is_connected_with_everybody(count: int) -> None:
    check_and_close(connect_ranks(count))


def test_many_streams() -> None:
    check_and_close(connect_ranks(2, streams=MOST_STREAMS))


def test_strangers_hold_nobody_up(seed: int) -> None:
    """Some say nothing, some say something else, some all but the right thing, some a lot."""
    rng = random.Random(seed)
    strangers = []

    def come(places: dict[int, RankAddress]) -> None:
        for place in places.values():
            for number in range(60):
                sock = socket.create_connection((place.address, place.port))
                head = [b"", b"GET / HTTP/1.0\r\n\r\n", GREETING, rng.randbytes(5000)][number % 4]
                sock.sendall(head)
                if number % 8 == 2:
                    sock.sendall(bytes([2, 0, 0, 0, 0, 0, 0, 0]) + bytes(32))
                    sock.sendall(bytes(32))
                if number % 3 == 0:
                    sock.close()
                strangers.append(sock)

    check_and_close(connect_ranks(3, before=come))
    for sock in strangers:
        sock.close()


@pytest.mark.parametrize(
    "other", [Pass("run/1/0", b"s" * 32, b"token"), Pass("run/0/0", b"t" * 32, b"token")]
)
def test_another_round_or_secret_gets_in_nowhere(other: Pass) -> None:
    listener, caller = connect_ranks(2, passes=[PASS, other])
    assert isinstance(caller, PeerLostError)
    assert isinstance(listener, CollectiveTimeoutError)


def test_another_token_is_explained() -> None:
    other = Pass(PASS.name, PASS.secret, b"")
    listener, caller = connect_ranks(2, passes=[PASS, other])
    assert isinstance(caller, PeerLostError)
    assert "RALLYPOINT_TOKEN is the same" in str(caller)
    assert isinstance(listener, CollectiveTimeoutError)
    assert "no connection to rank 11 at 127.0.0.1" in str(listener)


def test_a_rank_that_is_gone_is_named() -> None:
    refused = pytest.raises(HostError, match=r"rank 10 at 127.0.0.1:\d+ \(Connection refused\)")
    with reserved_port() as port, refused:
        made = new_mesh(listen("127.0.0.1", CONGESTION), 1, [10, 11], PASS)
        made.connect_all({0: RankAddress("127.0.0.1", port, 1)}, 1)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_host_without_a_route_is_called_again(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """The kernel says so for up to three seconds after a cable was plugged in again."""
    monkeypatch.setattr(mesh, "_NO_ROUTE_S", 600.0 if comes_back else 0.1)
    monkeypatch.setattr(mesh, "_CALL_EVERY_S", 0.02)
    connect_ex = socket.socket.connect_ex
    calls: Counter[int] = Counter()

    def connect(sock: socket.socket, address: tuple[str, int]) -> int:
        calls[threading.get_ident()] += 1
        is_back = comes_back and calls[threading.get_ident()] > 20
        return connect_ex(sock, address) if is_back else errno.EHOSTUNREACH

    monkeypatch.setattr(socket.socket, "connect_ex", connect)
    outcomes = connect_ranks(3)
    if comes_back:
        check_and_close(outcomes)
    else:
        assert isinstance(outcomes[1], HostError)
        assert "(No route to host)" in str(outcomes[1])


def test_an_address_of_somebody_else() -> None:
    with pytest.raises(HostError, match="name another interface"):
        listen("203.0.113.1", CONGESTION)


def test_strangers_that_say_nothing_keep_nobody_out() -> None:
    """More than a listener keeps, there before the ranks: the oldest go."""
    strangers: list[socket.socket] = []

    def crowd(places: dict[int, RankAddress]) -> None:
        for place in places.values():
            for _ in range(mesh._MOST_STRANGERS + 50):
                strangers.append(socket.create_connection((place.address, place.port)))

    check_and_close(connect_ranks(3, before=crowd))
    for each in strangers:
        each.close()
