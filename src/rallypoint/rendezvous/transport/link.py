"""One authenticated connection between two agents, in frames; for one selector, without threads.

    caller                                      listener
    GREETING, 32 random bytes          ->
                                       <-       32 random bytes
    HMAC-SHA256("client", both)        ->
                                       <-       HMAC-SHA256("server", both)
    frames: 4 bytes of length, payload <->
    length 2**32 - 1: I end this connection, and live

Until both have proved that they know the job token (an empty one, if the job has none), what comes
is of a fixed length and is not looked into. A frame's length is bounded before memory is taken.
A process that ends closes its connections without a message, and a live one never does, so the two
can be distinguished. What does not fit is left out, as messages between agents may be.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from rallypoint.store.token import (
    REFUSAL,
    ChallengeError,
    RefusedTokenError,
    Steps,
    examine,
    prove,
)

GREETING = b"RLYLNK3\n"
MAX_FRAME_BYTES = 16 << 20  # proposing 10,000 members with all their addresses takes up to 9 MiB
MAX_UNSENT_BYTES = 32 << 20
_LENGTH = struct.Struct("!I")
_DROPPED = 0xFFFFFFFF
_CHUNK = 64 << 10
_NAME_BYTES = 8
SILENCE_S = 10.0  # without an acknowledgement: end the connection, and make another
_FRESH_MS = 3000  # a reset after a longer silence may come from a live peer that gave us up
# Of struct tcp_info: its size, and where tcpi_unacked and tcpi_last_{data,ack}_recv (in ms) are.
_INFO_BYTES, _UNACKED_AT, _LAST_DATA_AT, _LAST_ACK_AT = 104, 24, 52, 56


class ConnectionListener(ABC):
    """Receives the events of a link."""

    @abstractmethod
    def opened(self, link: Link) -> None:
        """The other side has proved itself."""

    @abstractmethod
    def received(self, link: Link, payload: bytes) -> None:
        """A frame has arrived."""

    @abstractmethod
    def closed(self, link: Link, why: str) -> None:
        """The link is closed; not called after our own `close` or `drop`."""

    @abstractmethod
    def failed(self, link: Link, what: str) -> None:
        """Something was dropped; the other side is alive."""


class Link(ABC):
    """One connection.

    Attributes:
        peer: the other side's numeric address.
        name: what both sides call it; empty until it is open.
        is_open: whether both sides have proved themselves.
        was_ended: whether the kernel closed it for a process that ended; otherwise it broke on the
            way, or one side closed it and is alive.
        was_broken: whether it broke on the way, or was reset: our kernel ended it.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        listener: ConnectionListener,
        token: bytes,
    ) -> None:
        sock.setblocking(False)
        self.peer = ""
        self.name = ""
        self.is_open = False
        self.was_ended = False
        self.was_broken = False
        self._sock = sock
        self._selector = selector
        self._listener = listener
        self._handshake = self._challenge(token)
        self._hello, self._needed = next(self._handshake)
        self._unread = bytearray()
        self._unsent = bytearray()
        self._watched = 0  # the events that the selector reports to `_happened`
        self._is_closed = False
        self._is_dropped = False  # to be closed once everything is sent
        self._breaks = False  # nothing can be sent any more
        self._has_reported_full = False
        # The time of a send after which nothing has arrived.
        self._unanswered_since: float | None = None

    def send(self, payload: bytes) -> None:
        """Send a frame, now or when there is room. A frame that is too large is dropped."""
        if self._is_closed or self._is_dropped:
            return
        if self._unanswered_since is None:
            self._unanswered_since = time.monotonic()
        if len(payload) > MAX_FRAME_BYTES:
            self._listener.failed(
                self, f"a message of {len(payload)} bytes is too long, so it was not sent"
            )
        elif self._unsent and len(self._unsent) + len(payload) > MAX_UNSENT_BYTES:
            if not self._has_reported_full:
                self._has_reported_full = True
                self._listener.failed(self, "it is not reading; sending resumes when it does")
        else:
            self._write(_LENGTH.pack(len(payload)) + payload)

    def is_stalled(self, wait_s: float) -> bool:
        """Whether, for that long, nothing came and nothing that we sent was acknowledged.

        The other side's kernel acknowledges for a process that is slow or stopped. Ours is asked
        only about data that have been unanswered for half of that time: a message that was
        acknowledged, but not answered, must not make a later one look old.
        """
        now = time.monotonic()
        if self._unanswered_since is None or now < self._unanswered_since + wait_s / 2:
            return False
        info = self._info()
        if not _field(info, _UNACKED_AT):
            self._unanswered_since = None
            return False
        acknowledged_at = now - _field(info, _LAST_ACK_AT) / 1000
        self._unanswered_since = max(self._unanswered_since, acknowledged_at)
        return now >= self._unanswered_since + wait_s

    def flush(self, wait_s: float) -> None:
        """Wait until everything is sent, for a limited time."""
        deadline = time.monotonic() + wait_s
        while self._unsent and not self._is_closed and time.monotonic() < deadline:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            self._write(b"")
        if not self._is_closed:
            self._sock.setblocking(False)

    def finish(self, deadline: float) -> None:
        """Send what is queued, wait for the other side to close too, and close.

        Closing at once would discard data in transit, if something of theirs is unread.
        """
        self.flush(deadline - time.monotonic())
        try:
            self._sock.shutdown(socket.SHUT_WR)
            while True:
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
                if not self._sock.recv(_CHUNK):
                    break
        except OSError:
            pass
        self.close()

    def drop(self) -> None:
        """End only the connection: the other side learns that this agent is alive."""
        if not self.is_open:
            return self.close()
        if not self._is_dropped:
            self._is_dropped = True
            self._write(_LENGTH.pack(_DROPPED))
        return None

    def close(self) -> None:
        """End the connection because this agent ends."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._sock.fileno() in self._selector.get_map():
            self._selector.unregister(self._sock)
        self._sock.close()

    @abstractmethod
    def _challenge(self, token: bytes) -> Steps:
        """This side's part of the handshake."""

    @abstractmethod
    def _refuse_proof(self, error: ChallengeError) -> str:
        """Answer what is no proof, if it is to be answered; returns what is wrong."""

    # Bytes.

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events == self._watched:
            return
        watch = self._selector.modify if self._watched else self._selector.register
        watch(self._sock, events, self._happened)
        self._watched = events

    def _happened(self) -> None:
        if self._is_closed:
            return  # closed by another event in the same turn of the loop
        if self._unsent:
            self._write(b"")
        if not self._is_closed:
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            return self._broke(error)
        if not data:
            self.was_ended = True
            early = "it closed the connection during the handshake"
            return self._fail("its connection closed" if self.is_open else early)
        self._unanswered_since = None
        if self._is_dropped:
            return None
        self._unread += data
        while not self._is_closed and not self._is_dropped and self._take():
            pass
        return None

    def _take(self) -> bool:
        """Use the received bytes, if they are enough for something."""
        if not self.is_open:
            return self._go_on()
        if len(self._unread) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._unread)
        if length == _DROPPED:
            self._fail("it closed the connection, but is still running")
            return False
        if length > MAX_FRAME_BYTES:
            self._refuse(f"it announced a message of {length} bytes")
            return False
        end = _LENGTH.size + length
        if len(self._unread) < end:
            return False
        payload = bytes(self._unread[_LENGTH.size : end])
        del self._unread[:end]
        if payload:
            self._listener.received(self, payload)
        return True

    def _go_on(self) -> bool:
        """Take the next step of the handshake, if enough bytes have been received."""
        needed = self._needed
        if len(self._unread) < needed:
            return False
        data = bytes(self._unread[:needed])
        del self._unread[:needed]
        try:
            answer, self._needed = self._handshake.send(data)
        except StopIteration as end:
            self.is_open = True
            self.name = end.value[:_NAME_BYTES].hex()
            self._listener.opened(self)
        except ChallengeError as error:
            self._fail(self._refuse_proof(error))
            return False
        else:
            self._write(answer)
        return True

    def _write(self, data: bytes) -> None:
        if self._breaks:
            return None
        self._unsent += data
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent)
                del self._unsent[:sent]
        except (BlockingIOError, TimeoutError):
            pass
        except OSError as error:
            return self._broke(error)
        if not self._unsent:
            self._has_reported_full = False
            if self._is_dropped:
                self._close_unread()
                return None
        return self._watch()

    def _close_unread(self) -> None:
        """Read before closing: with unread data the kernel would reset the connection."""
        with suppress(OSError):
            while self._sock.recv(_CHUNK):
                pass
        self.close()

    def _broke(self, error: OSError) -> None:
        self._breaks = True
        was_reset = isinstance(error, ConnectionResetError | BrokenPipeError)
        was_ended = was_reset and self._silent_ms() < _FRESH_MS
        self._read_last()
        if not self._is_closed:
            self.was_broken, self.was_ended = True, was_ended
            self._fail(f"its connection broke: {error.strerror}")

    def _read_last(self) -> None:
        """What arrived before the connection broke; perhaps it says that the other side lives."""
        with suppress(OSError):
            while data := self._sock.recv(_CHUNK):
                self._unread += data
        while not self._is_closed and not self._is_dropped and self._take():
            pass

    def _silent_ms(self) -> int:
        """The time since the kernel last received something, even if we read it later."""
        return _field(self._info(), _LAST_DATA_AT)

    def _info(self) -> bytes:
        return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)

    def _refuse(self, why: str) -> None:
        self._listener.failed(self, f"{why}; reconnecting")
        self.drop()
        self._listener.closed(self, why)

    def _fail(self, why: str) -> None:
        was_open = not (self._is_closed or self._is_dropped)
        self.close()
        if was_open:
            self._listener.closed(self, why)


class Called(Link):
    """The listener's end."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        listener: ConnectionListener,
        token: bytes,
        silence_s: float = SILENCE_S,
    ) -> None:
        super().__init__(sock, selector, listener, token)
        _tend(sock, silence_s)
        self.peer = _plain(sock.getpeername()[0])
        self._watch()

    def _challenge(self, token: bytes) -> Steps:
        def token_for(greeting: bytes) -> bytes:
            if greeting != GREETING:
                raise _OtherProtocolError
            return token

        return examine(len(GREETING), token_for)

    def _refuse_proof(self, error: ChallengeError) -> str:
        if isinstance(error, _OtherProtocolError):
            return "it does not speak this protocol"
        self._write(REFUSAL)
        return WITHOUT_TOKEN


class Caller(Link):
    """The other end: connects to a numeric address."""

    def __init__(
        self,
        address: tuple[str, int],
        selector: selectors.BaseSelector,
        listener: ConnectionListener,
        token: bytes,
        silence_s: float = SILENCE_S,
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        super().__init__(sock, selector, listener, token)
        self.peer = address[0]
        try:
            _tend(sock, silence_s)
            sock.connect(address)
        except BlockingIOError:
            pass
        except OSError:
            sock.close()
            raise
        selector.register(sock, selectors.EVENT_WRITE, self._connected)

    def _connected(self) -> None:
        if self._is_closed:
            return None
        self._selector.unregister(self._sock)
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return self._fail(f"it does not answer: {os.strerror(error)}")
        return self._write(self._hello)

    def _challenge(self, token: bytes) -> Steps:
        return prove(token, GREETING)

    def _refuse_proof(self, error: ChallengeError) -> str:
        return TOKEN_REFUSED if isinstance(error, RefusedTokenError) else WITHOUT_TOKEN


class _OtherProtocolError(ChallengeError):
    """The caller did not greet as agents do."""


TOKEN_REFUSED = (
    "it has a different token; set the same RALLYPOINT_TOKEN, or --token-file, on all nodes"
)
WITHOUT_TOKEN = "it does not have the job's token"


def _tend(sock: socket.socket, silence_s: float) -> None:
    """Send small messages at once, and notice within that time that nothing gets through."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(silence_s / 5)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _field(info: bytes, offset: int) -> int:
    """A number of struct tcp_info."""
    return int.from_bytes(info[offset : offset + 4], sys.byteorder)


def _plain(address: str) -> str:
    """An IPv4 address as itself, also when it came through an IPv6 socket."""
    return address.removeprefix("::ffff:")
