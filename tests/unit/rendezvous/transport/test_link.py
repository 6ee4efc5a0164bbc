"""Links between agents: what gets through, and what every kind of bad peer gets instead."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from tests.ports import reserved_port

from rallypoint.rendezvous.transport import link as link_module
from rallypoint.rendezvous.transport.link import (
    GREETING,
    MAX_FRAME_BYTES,
    TOKEN_REFUSED,
    Called,
    Caller,
    ConnectionListener,
    Link,
)


class Side(ConnectionListener):
    """Notes all that it is told."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.frames: list[bytes] = []
        self.why = ""
        self.failures: list[str] = []

    def opened(self, link: Link) -> None:
        self.link = link

    def received(self, link: Link, payload: bytes) -> None:
        self.frames.append(payload)

    def closed(self, link: Link, why: str) -> None:
        self.why = why

    def failed(self, link: Link, what: str) -> None:
        self.failures.append(what)


class Loop:
    """A listener with one token, its links' side, and the loop that serves both ends."""

    def __init__(self, token: bytes) -> None:
        self.selector = selectors.DefaultSelector()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", self.server.getsockname()[1])
        self.side = Side()
        self.token = token
        self.links: list[Link] = []
        self.selector.register(self.server, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        sock, _ = self.server.accept()
        self.links.append(Called(sock, self.selector, self.side, self.token))

    def call(self, side: Side, token: bytes) -> Link:
        self.links.append(Caller(self.address, self.selector, side, token))
        return self.links[-1]

    def until(self, done: Callable[[], object]) -> None:
        while not done():
            for key, _ in self.selector.select(0.05):
                key.data()

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.server.close()
        self.selector.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop(b"secret")
    yield loop
    loop.close()


@pytest.fixture
def pair(loop: Loop) -> tuple[Loop, Side]:
    caller = Side()
    loop.call(caller, b"secret")
    loop.until(lambda: caller.link and loop.side.link)
    return loop, caller


def test_frames_of_all_sizes_come_whole_and_in_order(pair: tuple[Loop, Side]) -> None:
    loop, caller = pair
    sent = [os.urandom(size) for size in (1, 2, 65535, 65536, 1_000_000, 3)]
    assert caller.link is not None
    assert loop.side.link is not None
    for payload in sent:
        caller.link.send(payload)
        loop.side.link.send(payload)
    caller.link.send(b"")  # which says nothing
    loop.until(lambda: len(loop.side.frames) == len(caller.frames) == len(sent))
    assert loop.side.frames == caller.frames == sent
    assert loop.side.link.peer == "127.0.0.1"


def test_a_close_is_told_with_what_came_before(pair: tuple[Loop, Side]) -> None:
    loop, caller = pair
    assert caller.link is not None
    caller.link.send(b"last words")
    caller.link.finish(time.monotonic() + 0.2)
    loop.until(lambda: loop.side.why)
    assert loop.side.frames == [b"last words"]
    assert loop.side.why == "its connection closed"


@pytest.mark.parametrize("token", [b"", b"secret2", b"secre"])
def test_another_token(loop: Loop, token: bytes) -> None:
    caller = Side()
    loop.call(caller, token)
    loop.until(lambda: caller.why and loop.side.why)
    assert caller.why == TOKEN_REFUSED
    assert loop.side.why == "it does not have the job's token"
    assert caller.link is loop.side.link is None


def take(loop: Loop, sock: socket.socket, size: int) -> bytes:
    """That many bytes from a socket, while the loop runs."""
    sock.setblocking(False)
    found = b""

    def is_all() -> bool:
        nonlocal found
        with contextlib.suppress(BlockingIOError):
            found += sock.recv(size - len(found))
        return len(found) == size

    loop.until(is_all)
    return found


def test_a_listener_that_does_not_know_the_token(loop: Loop) -> None:
    """Whatever it answers, it is not believed: here, what the caller itself has just sent."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        loop.address = impostor.getsockname()
        caller = Side()
        loop.call(caller, b"secret")
        sock, _ = impostor.accept()
        with sock:
            nonce = take(loop, sock, len(GREETING) + 32)[len(GREETING) :]
            sock.sendall(nonce)
            sock.sendall(take(loop, sock, 32))
            loop.until(lambda: caller.why)
    assert caller.why == "it does not have the job's token"


def test_nobody_there(loop: Loop) -> None:
    caller = Side()
    with reserved_port() as port:
        loop.address = ("127.0.0.1", port)
        loop.call(caller, b"secret")
        loop.until(lambda: caller.why)
    assert caller.why == "it does not answer: Connection refused"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: y\r\n\r\n", "does not speak this protocol"),
        (GREETING + bytes(32) + bytes(32), "does not have the job's token"),
        (b"", "during the handshake"),
        (GREETING, "during the handshake"),
    ],
)
def test_strangers(loop: Loop, data: bytes, why: str) -> None:
    with socket.create_connection(loop.address) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        loop.until(lambda: loop.side.why)
    assert why in loop.side.why
    assert loop.side.link is None
    assert loop.side.frames == []


def test_a_frame_that_is_too_long_is_not_waited_for(pair: tuple[Loop, Side]) -> None:
    """Nor is it a death: both sides live, and know it."""
    loop, caller = pair
    assert caller.link is not None
    assert loop.side.link is not None
    loop.side.link.send(b"a word before")
    caller.link._sock.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big") + bytes(1 << 20))
    loop.until(lambda: loop.side.why and caller.why)
    assert loop.side.why == f"it announced a message of {MAX_FRAME_BYTES + 1} bytes"
    assert loop.side.failures == [f"{loop.side.why}; reconnecting"]
    assert caller.frames == [b"a word before"]
    assert caller.why == "it closed the connection, but is still running"
    assert not caller.link.was_ended
    assert not loop.side.link.was_ended


def test_a_message_that_is_too_long_is_not_sent(pair: tuple[Loop, Side]) -> None:
    loop, caller = pair
    assert caller.link is not None
    caller.link.send(bytes(MAX_FRAME_BYTES + 1))
    caller.link.send(b"a short one")
    loop.until(lambda: loop.side.frames)
    assert loop.side.frames == [b"a short one"]
    told = f"a message of {MAX_FRAME_BYTES + 1} bytes is too long, so it was not sent"
    assert caller.failures == [told]


def test_a_peer_that_reads_nothing_does_not_fill_memory(pair: tuple[Loop, Side]) -> None:
    """What does not fit is left out and told once, and when it reads again all goes on."""
    loop, caller = pair
    link = loop.side.link
    assert link is not None
    for _ in range(100):
        link.send(bytes(1 << 20))
    assert loop.side.failures == ["it is not reading; sending resumes when it does"]
    loop.until(lambda: not link._unsent)
    link.send(b"it reads again")
    loop.until(lambda: b"it reads again" in caller.frames)
    assert 30 < len(caller.frames) < 50
    assert not loop.side.why
    assert not caller.why


def test_the_last_word_waits_until_a_peer_reads(pair: tuple[Loop, Side]) -> None:
    """Who ends a connection in the middle of a long message must not look dead for it."""
    loop, caller = pair
    link = loop.side.link
    assert link is not None
    for _ in range(10):
        link.send(bytes(1 << 20))
    link.drop()
    link.drop()
    link.send(b"nothing more")
    loop.until(lambda: caller.why)
    assert caller.why == "it closed the connection, but is still running"
    assert len(caller.frames) == 10
    assert not loop.side.why
    assert link._is_closed


@pytest.mark.parametrize("is_late", [False, True])
def test_a_reset_tells_of_an_end_only_if_it_is_fresh(
    pair: tuple[Loop, Side], monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """A kernel that gave the connection up long ago answers so, too, however late we read."""
    loop, caller = pair
    assert caller.link is not None
    assert loop.side.link is not None
    fresh_ms = 20 if is_late else 600_000
    monkeypatch.setattr(link_module, "_FRESH_MS", fresh_ms)
    caller.link.send(b"hello")
    sock = caller.link._sock
    loop.selector.unregister(sock)
    caller.link._is_closed = True
    if is_late:
        time.sleep(0.05)  # we were paused, say
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()  # by a reset
    loop.until(lambda: loop.side.why)
    assert loop.side.frames == [b"hello"]
    assert loop.side.why == "its connection broke: Connection reset by peer"
    assert loop.side.link.was_ended is not is_late


def test_a_reset_does_not_overtake_a_farewell(pair: tuple[Loop, Side]) -> None:
    """A peer that replaces a connection resets it if something arrives afterwards."""
    loop, caller = pair
    assert caller.link is not None
    link = loop.side.link
    assert link is not None
    caller.link.send(b"hello")
    caller.link.drop()
    while not loop.side.why:
        link.send(b"the first of these is answered by a reset")
        time.sleep(0.01)
    assert loop.side.why == "it closed the connection, but is still running"
    assert loop.side.frames == [b"hello"]
    assert not link.was_ended
    assert not link.was_broken


@pytest.mark.parametrize(
    ("sent_ago_s", "unacknowledged", "heard_ago_s", "is_stalled"),
    [
        (None, 1, 60.0, False),  # nothing was sent since something came
        (1.9, 1, 60.0, False),  # it was idle, and what was sent now is under way
        (2.1, 1, 60.0, True),
        (60.0, 0, 60.0, False),  # all is acknowledged
        (1.1, 0, 60.0, False),  # and what is sent later is not as old as that
        (60.0, 1, 1.9, False),  # its kernel still says something
        (60.0, 1, 2.1, True),
    ],
)
def test_what_is_stalled(
    pair: tuple[Loop, Side],
    monkeypatch: pytest.MonkeyPatch,
    sent_ago_s: float | None,
    unacknowledged: int,
    heard_ago_s: float,
    is_stalled: bool,
) -> None:
    _, caller = pair
    link = caller.link
    assert link is not None
    info = bytearray(104)
    struct.pack_into("=I", info, 24, unacknowledged)
    struct.pack_into("=I", info, 56, int(heard_ago_s * 1000))
    now = 1000.0
    monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(link, "_info", lambda: bytes(info))
    link._unanswered_since = None if sent_ago_s is None else now - sent_ago_s
    assert link.is_stalled(2.0) is is_stalled
    is_forgotten = link._unanswered_since is None
    assert is_forgotten is (sent_ago_s is None or unacknowledged == 0)


def test_both_sides_call_it_by_one_name(pair: tuple[Loop, Side]) -> None:
    loop, caller = pair
    assert caller.link is not None
    assert loop.side.link is not None
    assert caller.link.name == loop.side.link.name != ""
