"""Connections between agents: what is told of their ends, and what is not."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from tests.conftest import SOON_S

from rallypoint.rendezvous.job.round import Endpoint
from rallypoint.rendezvous.transport import link
from rallypoint.rendezvous.transport import peer_connections as connections
from rallypoint.rendezvous.transport.link import MAX_FRAME_BYTES
from rallypoint.rendezvous.transport.peer_connections import PeerConnections, Receiver


class Agent(Receiver):
    """A connections, and what it told; `at_end` is called for an agent that has ended."""

    def __init__(self, key: str) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.at = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
        self.board = PeerConnections(key, b"token", listener, self)
        self.told: list[tuple[str, str]] = []
        self.at_end: Callable[[], None] = lambda: None
        self._is_closed = False

    def close(self, wait_s: float = 0) -> None:
        """Once."""
        if not self._is_closed:
            self._is_closed = True
            self.board.close(wait_s)

    def heard(self, key: str, payload: bytes) -> None:
        self.told.append((key, payload[:8].decode()))

    def gone(self, key: str, why: str) -> None:
        self.told.append((key, "gone"))
        self.at_end()

    def failed(self, address: str, what: str) -> None:
        self.told.append((address, what))

    def unreachable(self, at: Endpoint, why: str) -> None:
        self.told.append((str(at), "unreachable"))

    def has_told_of_an_end(self) -> bool:
        """Of any agent's."""
        return any(what == "gone" for _, what in self.told)


@pytest.fixture
def pair() -> Iterator[tuple[Agent, Agent]]:
    """Two agents that have spoken with each other."""
    one, other = Agent("one"), Agent("other")
    one.board.call(other.at, b"hello")
    until(lambda: ("one", "hello") in other.told, one, other)
    other.board.send("one", None, b"hello")
    until(lambda: ("other", "hello") in one.told, one, other)
    yield one, other
    one.close()
    other.close()


def until(is_so: Callable[[], bool], *agents: Agent) -> None:
    end = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < end
        for agent in agents:
            agent.board.poll(0.01)


def test_an_agent_that_ended_is_told(pair: tuple[Agent, Agent]) -> None:
    one, other = pair
    other.close()
    until(lambda: ("other", "gone") in one.told, one)


def test_nothing_is_begun_while_it_closes(pair: tuple[Agent, Agent]) -> None:
    """What is unsent breaks on a peer that ended: who is told of that may want to tell a third."""
    one, other = pair
    third = Agent("third")
    one.at_end = lambda: one.board.send("third", third.at, b"the other has ended")
    for _ in range(4):
        one.board.send("other", None, bytes(4 << 20))  # more than the kernel takes
    other.close()
    one.close(SOON_S)
    assert ("other", "gone") not in one.told
    for _ in range(20):
        third.board.poll(0.01)
    assert not third.told
    third.close()


def test_a_refused_message_is_no_end(pair: tuple[Agent, Agent]) -> None:
    """The connection is made again, and nobody takes the other one for dead."""
    one, other = pair
    next(iter(one.board._keys))._write((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    until(lambda: not one.board._keys and not other.board._keys, one, other)
    told = f"it announced a message of {MAX_FRAME_BYTES + 1} bytes"
    assert ("127.0.0.1", f"{told}; the connection is ended, and made again") in other.told
    one.board.send("other", other.at, b"again")
    until(lambda: ("one", "again") in other.told, one, other)
    assert not one.has_told_of_an_end()
    assert not other.has_told_of_an_end()


def test_an_agent_that_reads_nothing_is_not_told_as_ended(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "MAX_UNSENT_BYTES", 1 << 20)
    one, other = pair
    for _ in range(200):
        one.board.send("other", None, bytes(100 << 10))
    until(lambda: len(other.told) > 10, one, other)
    one.board.send("other", None, b"again")
    until(lambda: ("one", "again") in other.told, one, other)
    assert not one.has_told_of_an_end()
    assert not other.has_told_of_an_end()


def test_who_is_refused_does_not_take_the_other_for_dead() -> None:
    """Its key is none, say, or another agent's."""
    one, other = Agent("no key!"), Agent("other")
    one.board.call(other.at, b"hello")
    until(lambda: one.board._who.get(other.at) == "other", one, other)
    until(lambda: not one.board._keys, one, other)
    assert not one.has_told_of_an_end()
    one.close()
    other.close()


def test_who_is_slow_does_not_take_the_other_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has proved itself, but its key has not come."""
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.5)
    one, other = Agent("one"), Agent("other")
    monkeypatch.setattr(one.board, "_key", "")  # an empty frame says nothing
    one.board.call(other.at, b"")
    until(lambda: one.board._who.get(other.at) == "other", one, other)
    until(lambda: not one.board._keys, one, other)
    assert not one.has_told_of_an_end()
    one.close()
    other.close()


def test_a_dropped_connection_is_closed_as_well(pair: tuple[Agent, Agent]) -> None:
    one, _ = pair
    (link,) = one.board._links["other"]
    for _ in range(4):
        one.board.send("other", None, bytes(4 << 20))
    link._refuse("it announced a message of 4294967294 bytes")
    one.close()
    assert link._sock.fileno() == -1
