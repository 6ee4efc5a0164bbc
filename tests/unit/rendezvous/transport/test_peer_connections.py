"""Connections between agents: what is told of their ends, and what is not."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from tests.ports import reserved_port

from rallypoint.rendezvous.job.round import Endpoint
from rallypoint.rendezvous.transport import link
from rallypoint.rendezvous.transport import peer_connections as connections
from rallypoint.rendezvous.transport.link import MAX_FRAME_BYTES
from rallypoint.rendezvous.transport.peer_connections import PeerConnections, Receiver

STALLED_S = 0.3
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # of asm-generic/socket.h
_KEEP_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # a struct sock_filter


class Agent(Receiver):
    """Connections, and what they told; a heartbeat is answered.

    `at_end` is called for an agent that has ended.
    """

    def __init__(
        self,
        key: str,
        *,
        listens: bool = True,
        lost_s: float | None = None,
        token: bytes = b"token",
    ) -> None:
        listener = socket.create_server(("127.0.0.1", 0)) if listens else None
        port = listener.getsockname()[1] if listener else 0
        self.at = Endpoint(host="127.0.0.1", port=port)
        self.key = key
        self.board = PeerConnections(key, token, listener, self, stalled_s=STALLED_S, lost_s=lost_s)
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
        if payload == b"heartbeat":
            self.board.send(key, None, b"answer")

    def gone(self, key: str, why: str) -> None:
        self.told.append((key, "gone"))
        self.at_end()

    def failed(self, address: str, what: str) -> None:
        self.told.append((address, what))

    def refused(self, address: str) -> None:
        self.told.append((address, "refused"))

    def unreachable(self, at: Endpoint, why: str) -> None:
        self.told.append((str(at), "unreachable"))

    def has_told_of_an_end(self) -> bool:
        """Of any agent's."""
        return any(what == "gone" for _, what in self.told)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not get its turn is no silent peer: only what is stalled ends."""
    monkeypatch.setattr(connections, "HANDSHAKE_S", 600.0)
    monkeypatch.setattr(connections, "SILENCE_S", 600.0)


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
    while not is_so():
        for agent in agents:
            agent.board.poll(0.01)


def test_an_agent_that_ended_is_told(pair: tuple[Agent, Agent]) -> None:
    one, other = pair
    other.close()
    until(lambda: ("other", "gone") in one.told, one)


def test_one_that_does_not_listen_calls_and_is_answered() -> None:
    one, other = Agent("one", listens=False), Agent("other")
    one.board.call(other.at, b"heartbeat")
    until(lambda: ("other", "answer") in one.told, one, other)
    one.close()
    until(lambda: ("one", "gone") in other.told, other)
    other.close()


def test_an_agent_with_another_token_is_reported_on_both_sides() -> None:
    one, other = Agent("one", listens=False, token=b"another"), Agent("other")
    one.board.call(other.at, b"heartbeat")
    until(lambda: bool(one.told and other.told), one, other)
    assert one.told == [(str(other.at), "unreachable")]
    assert other.told == [("127.0.0.1", "refused")]
    one.close()
    other.close()


@pytest.mark.parametrize("lost_s", [None, 1.0])
def test_whether_a_connection_that_broke_is_an_end(lost_s: float | None) -> None:
    """On both sides, also on the one that has nothing to say."""
    one, other = Agent("one", lost_s=lost_s), Agent("other", lost_s=lost_s)
    one.board.call(other.at, b"heartbeat")
    until(lambda: ("other", "answer") in one.told, one, other)
    for link_ in (the_link(one, "other"), the_link(other, "one")):
        link_._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000)
        link_._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        link_._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        drop_packets_to(link_)
    one.board.send("other", None, b"heartbeat")
    until(lambda: not one.board._keys and not other.board._keys, one, other)
    assert one.has_told_of_an_end() == other.has_told_of_an_end() == (lost_s is not None)
    one.close()
    other.close()


def test_nothing_is_begun_while_it_closes(pair: tuple[Agent, Agent]) -> None:
    """What is unsent breaks on a peer that ended: who is told of that may want to tell a third."""
    one, other = pair
    third = Agent("third")
    one.at_end = lambda: one.board.send("third", third.at, b"the other has ended")
    for _ in range(4):
        one.board.send("other", None, bytes(4 << 20))  # more than the kernel takes
    other.close()
    one.close(60)
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
    assert ("127.0.0.1", f"{told}; reconnecting") in other.told
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
    one, other = Agent("one"), Agent("other")
    monkeypatch.setattr(one.board, "_key", "")  # an empty frame says nothing
    one.board.call(other.at, b"")
    until(lambda: one.board._who.get(other.at) == "other", one, other)
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.1)
    other.board._set_alarm()
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


def drop_packets_to(one: link.Link) -> None:
    """As a firewall that lost the connection's state: not even its kernel sees them."""
    code = ctypes.create_string_buffer(_KEEP_NOTHING, len(_KEEP_NOTHING))
    program = struct.pack("HP", 1, ctypes.addressof(code))
    one._sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def deliver_packets_to(one: link.Link) -> None:
    """Again."""
    one._sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def the_link(agent: Agent, key: str) -> link.Link:
    (one,) = agent.board._links[key]
    return one


def heartbeat(sender: Agent, to: Agent, at: Endpoint | None = None) -> None:
    sender.board.send(to.key, at or to.at, b"heartbeat")


def beat_until_answered(sender: Agent, to: Agent) -> float:
    """The seconds it took."""
    began = time.monotonic()
    sender.told.clear()

    def is_answered() -> bool:
        heartbeat(sender, to)
        return (to.key, "answer") in sender.told

    until(is_answered, sender, to)
    return time.monotonic() - began


@pytest.mark.parametrize("sender", ["caller", "listener"])
@pytest.mark.parametrize("deaf", ["one", "other", "both"])
def test_a_connection_whose_flow_was_dropped_is_replaced(
    pair: tuple[Agent, Agent], deaf: str, sender: str
) -> None:
    """Whichever way packets are lost; only who sends calls again, and both use what comes of it."""
    one, other = pair
    olds = [the_link(one, "other"), the_link(other, "one")]
    for name, old in zip(("one", "other"), olds, strict=True):
        if deaf in (name, "both"):
            drop_packets_to(old)
    us, them = (one, other) if sender == "caller" else (other, one)
    # Half: what is unacknowledged may have been sent a while after the last acknowledgement.
    assert beat_until_answered(us, them) >= STALLED_S / 2
    assert the_link(one, "other") not in olds
    assert the_link(other, "one") not in olds
    until(lambda: all(old._sock.fileno() == -1 for old in olds), one, other)
    news = [the_link(one, "other"), the_link(other, "one")]
    beat_until_answered(them, us)
    assert [the_link(one, "other"), the_link(other, "one")] == news
    assert not one.has_told_of_an_end()
    assert not other.has_told_of_an_end()


def test_both_may_replace_it_at_once(pair: tuple[Agent, Agent]) -> None:
    one, other = pair
    olds = [the_link(one, "other"), the_link(other, "one")]
    for old in olds:
        drop_packets_to(old)

    def are_both_calling() -> bool:
        heartbeat(one, other)
        heartbeat(other, one)
        time.sleep(0.01)  # as full connections stay until the kernel gives them up
        return bool(one.board._calls and other.board._calls)

    until(are_both_calling)
    beat_until_answered(one, other)
    beat_until_answered(other, one)
    until(lambda: all(old._sock.fileno() == -1 for old in olds), one, other)
    assert len(one.board._links["other"]) == len(other.board._links["one"]) == 2
    assert not one.has_told_of_an_end()
    assert not other.has_told_of_an_end()


@pytest.mark.parametrize("who_ends", ["caller", "listener"])
def test_an_end_after_a_replacement_is_told_at_once(
    pair: tuple[Agent, Agent], who_ends: str
) -> None:
    """Nobody waits for the old connection, which would be silent for ten minutes."""
    one, other = pair
    for old in (the_link(one, "other"), the_link(other, "one")):
        drop_packets_to(old)
    beat_until_answered(one, other)
    ended, left = (one, other) if who_ends == "caller" else (other, one)
    ended.close()
    until(lambda: (ended.key, "gone") in left.told, left)


def test_a_slow_agent_keeps_its_connection(pair: tuple[Agent, Agent]) -> None:
    """It reads nothing; its kernel takes what comes, and then says that it has no more room."""
    one, other = pair
    old = the_link(one, "other")
    end = time.monotonic() + 4 * STALLED_S
    while time.monotonic() < end or not old._unsent:
        one.board.send("other", other.at, b"" if old._unsent else bytes(100 << 10))
        one.board.poll(0.01)
        assert not one.board._calls
    while old._unsent:
        other.board.poll()
        one.board.poll()
    beat_until_answered(one, other)
    assert the_link(one, "other") is old


def test_an_idle_connection_is_kept_and_costs_nothing(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is asked only about what is unanswered for long."""
    one, other = pair
    beat_until_answered(one, other)
    until(lambda: not one.board._selector.select(0), one, other)
    monkeypatch.setattr(one.board, "_stalled_s", 90.0)
    monkeypatch.setattr(link.Link, "_info", None)
    old = the_link(one, "other")
    later = Later()
    monkeypatch.setattr(link, "time", later)
    for _ in range(3):
        later.by_s += 100
        heartbeat(one, other)
        heartbeat(one, other)
        one.told.clear()
        until(lambda: one.told.count(("other", "answer")) == 2, one, other)
    assert the_link(one, "other") is old
    assert not one.board._calls


def test_new_words_are_not_as_old_as_acknowledged_ones(pair: tuple[Agent, Agent]) -> None:
    """Also where the first ones are said without knowing where the other one listens."""
    one, _ = pair
    old = the_link(one, "other")
    old._unanswered_since = time.monotonic() - 60
    until(lambda: not link._field(old._info(), link._UNACKED_AT), one)
    one.board.send("other", None, b"heartbeat")
    assert old._unanswered_since > time.monotonic() - 60


class Later:
    """The module `time`, some seconds from now."""

    def __init__(self) -> None:
        self.by_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.by_s


def test_silence_stays_silence_while_nobody_answers(pair: tuple[Agent, Agent]) -> None:
    """Nothing is told, nothing is dropped, and if the packets come again, all goes on."""
    one, other = pair
    old = the_link(one, "other")
    drop_packets_to(old)
    calls = 0

    def has_called_in_vain() -> bool:
        nonlocal calls
        heartbeat(one, other, nobody)
        was_calling = bool(one.board._calls)
        one.board.poll(0.01)
        calls += was_calling and not one.board._calls
        return calls >= 3

    with reserved_port() as port:
        nobody = Endpoint(host="127.0.0.1", port=port)
        until(has_called_in_vain)
    assert the_link(one, "other") is old
    assert one.told == [("other", "hello")]
    deliver_packets_to(old)
    until(lambda: ("other", "answer") in one.told, one, other)
    assert the_link(one, "other") is old
    assert not one.has_told_of_an_end()
    assert not other.has_told_of_an_end()


def test_another_agent_in_the_place_of_a_silent_one(pair: tuple[Agent, Agent]) -> None:
    one, other = pair
    drop_packets_to(the_link(one, "other"))
    third = Agent("third")

    def is_gone() -> bool:
        heartbeat(one, other, third.at)
        return ("other", "gone") in one.told

    until(is_gone, one, third)
    assert "other" not in one.board._links
    assert not third.told
    third.close()


def test_an_agent_names_only_its_own_connections(pair: tuple[Agent, Agent]) -> None:
    """Whoever else claims that one is replaced is not believed."""
    one, other = pair
    theirs = the_link(other, "one")
    third = Agent("third")
    third.board._key = f"third,{theirs.name}"
    third.board.call(other.at, b"hello")
    until(lambda: ("third", "hello") in other.told, third, other)
    assert the_link(other, "one") is theirs
    assert one.board._links["other"]
    third.close()


def test_answers_take_the_newest_connection(pair: tuple[Agent, Agent]) -> None:
    """The old one broke on one side only: the other side hears nothing of that."""
    one, other = pair
    old = the_link(one, "other")
    drop_packets_to(the_link(other, "one"))
    old._broke(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
    beat_until_answered(one, other)
    assert len(other.board._links["one"]) == 2
