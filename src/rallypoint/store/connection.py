"""One client connection: sends and receives bytes, each operation with a deadline.

It connects to the server, sends the handshake and learns whether the server is ours. The kernel
enforces the timeout (SO_RCVTIMEO), which saves one poll per reply. A forked child closes the
connections that it inherited, because it must not share them with its parent.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import time
import weakref
from contextlib import suppress

from rallypoint import _native
from rallypoint.base.address import endpoint_of, is_loopback, loopback_trouble, numeric_family
from rallypoint.base.errors import StoreConnectionError, StoreRefusedError
from rallypoint.base.worker_env import read_silence
from rallypoint.store import wire

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0
_GROWTH = 1.2  # growth of pauses: each is about a sixth of the time waited so far
_CHUNK = 65536

Address = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]


class Connection:
    """A connection that has introduced itself. `ours`: whether replies carry a status."""

    def __init__(self, sock: socket.socket, endpoint: str) -> None:
        self.endpoint = endpoint
        self.ours = False
        self._socket = sock
        self._fd = sock.fileno()
        self._buffer = b""
        self._timeout_s = 0.0
        self._deadline = 0.0
        _open_connections.add(self)

    def start(self, timeout_s: float) -> None:
        """Give the exchange that begins now `timeout_s` seconds."""
        self._deadline = time.monotonic() + timeout_s
        if timeout_s != self._timeout_s:
            self._limit(timeout_s)

    def _limit(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        microseconds = max(1000, min(int(timeout_s * 1e6), 10**15))
        limit = struct.pack("@ll", *divmod(microseconds, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, data: bytes) -> None:
        """Send all of `data`."""
        sent = self._send_some(data)
        if sent == len(data):
            return
        rest = memoryview(data)[sent:]
        while rest:
            self._check_deadline()
            rest = rest[self._send_some(rest) :]

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            raise TimeoutError from None

    def receive(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if len(self._buffer) < size:
            self._fill(size)
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _fill(self, size: int) -> None:
        """Receive until the buffer has `size` bytes or more."""
        parts, got = [self._buffer], len(self._buffer)
        try:
            while got < size:
                parts.append(self._receive_some(min(max(size - got, _CHUNK), 16 * _CHUNK)))
                got += len(parts[-1])
                if got < size:
                    self._check_deadline()
        finally:
            self._buffer = b"".join(parts)

    def _receive_some(self, limit: int) -> bytes:
        try:
            data = self._socket.recv(limit)
        except BlockingIOError:
            raise TimeoutError from None
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    def _check_deadline(self) -> None:
        # Each piece that arrives restarts the kernel's clock; a slow trickle must end too.
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if left < self._timeout_s / 2:
            self._limit(left)

    def exchange(self, request: bytes, size: int, timeout_s: float) -> bytes:
        """Send a short `request` and return the first `size` bytes of the reply: the fast path."""
        if self._buffer or timeout_s != self._timeout_s:
            self.start(timeout_s)
            self.send(request)
            return self.receive(size)
        try:
            reply = _native.exchange(self._fd, request)
        except BlockingIOError:
            raise TimeoutError from None
        if len(reply) == size:
            return reply
        if not reply:
            raise ConnectionResetError("the server closed the connection")
        self.start(timeout_s)
        self._buffer = reply
        return self.receive(size)

    def await_byte(self) -> None:
        """Wait until there is a byte to receive."""
        if not self._buffer:
            self._buffer = self._receive_some(_CHUNK)

    def put_back(self, data: bytes) -> None:
        """Undo the receipt of `data`."""
        self._buffer = data + self._buffer

    def peek(self) -> int:
        """Return the next byte and leave it there."""
        self.await_byte()
        return self._buffer[0]

    def receive_available(self, timeout_s: float | None) -> bytes:
        """Return what comes within `timeout_s`, or ever; empty if nothing does."""
        if self._buffer:
            data, self._buffer = self._buffer, b""
            return data
        milliseconds = None if timeout_s is None else max(0, round(timeout_s * 1000))
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return self._receive_some(_CHUNK) if poll.poll(milliseconds) else b""

    def receive_u8(self) -> int:
        """Return the next byte."""
        return self.receive(1)[0]

    def receive_i64(self) -> int:
        """Return the next signed 64-bit integer."""
        return int.from_bytes(self.receive(8), "little", signed=True)

    def receive_blob(self) -> bytes:
        """Return the next blob."""
        size = self.receive_i64()
        if not 0 <= size <= wire.MAX_APPENDED:
            raise ConnectionError(
                f"the server announced {size} bytes, which is not a reply of a store"
            )
        return self.receive(size)

    def fileno(self) -> int:
        """Return the descriptor, to wait for what the server pushes."""
        return self._socket.fileno()

    def interrupt(self) -> None:
        """End what waits for the server, with an error; another thread may call it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._fd = -1
        self._socket.close()


class _Socket(socket.socket):
    """As with torch's stores, dropping the last reference is enough: there is no warning."""

    def __del__(self) -> None:
        self.close()


def connect(host: str, port: int, timeout_s: float, token: bytes | None = None) -> Connection:
    """Connect and introduce ourselves, trying again until the time is up."""
    endpoint = endpoint_of(host, port)
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return _connect_once(host, port, endpoint, deadline, token)
        except StoreRefusedError:
            raise
        except OSError as error:
            _raise_if_in_vain(error, host, endpoint)
            pause_s = min(pause_s * _GROWTH, _LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)
            if time.monotonic() + pause_s >= deadline:
                raise StoreConnectionError(
                    f"no store answered at {endpoint} within {timeout_s:g} s "
                    f"({error.strerror or str(error) or 'no answer in time'}); "
                    "check that its server is running, and check the address and port",
                    endpoint=endpoint,
                    operation="connect",
                ) from error
            time.sleep(pause_s)


def _raise_if_in_vain(error: OSError, host: str, endpoint: str) -> None:
    """Raise an error that says what keeps this process from connecting, however often it tries."""
    from rallypoint.base.refusals import refusal_in  # trying again takes longer

    refusal = refusal_in(error)
    if refusal is not None:
        raise refusal from None
    trouble = loopback_trouble(host) if is_loopback(host) else ""
    if trouble:
        raise StoreConnectionError(
            f"the store at {endpoint} cannot be reached: {trouble}",
            endpoint=endpoint,
            operation="connect",
        ) from None


def _connect_once(
    host: str, port: int, endpoint: str, deadline: float, token: bytes | None
) -> Connection:
    failure: OSError = ConnectionRefusedError("the name does not resolve to an address")
    for family, address in _addresses(host, port):
        sock = _Socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():
                # A free local port can connect to itself; no server is there.
                raise ConnectionRefusedError("nothing listens there")
            sock.settimeout(None)
            _set_options(sock)
            connection = Connection(sock, endpoint)
            connection.start(max(deadline - time.monotonic(), 0.001))
            if token is not None:
                _prove(connection, token)
            _introduce(connection)
            return connection
        except StoreRefusedError:
            sock.close()
            raise
        except OSError as error:
            failure = error
            sock.close()
    raise failure


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A server machine that vanished is noticed, after 10 s, even by a watch without a limit.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, read_silence(os.environ))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)


def _prove(connection: Connection, token: bytes) -> None:
    """Pass the challenge of a server with a token, and put the same to it (store/token.py)."""
    # Only users of a token pay for the import.
    from rallypoint.store.token import GREETING, NONCE, PROOF, client_proof, is_server_proof

    ours = os.urandom(NONCE)
    connection.send(GREETING + ours)
    theirs = connection.receive(NONCE)
    connection.send(client_proof(token, ours, theirs))
    first = connection.receive(4)
    if int.from_bytes(first, "little") == wire.TOKEN_REFUSED:
        raise _refusal(connection, "the server has a different token; set the same one for both")
    if not is_server_proof(first + connection.receive(PROOF - 4), token, ours, theirs):
        raise _refusal(
            connection, "the server could not prove that it knows the token; another program may "
            "be using its port"
        )  # fmt: skip


def _introduce(connection: Connection) -> None:
    """Say VALIDATE and PING. A stock server echoes the number of the PING, ours answers it."""
    connection.send(
        wire.u8(wire.Opcode.VALIDATE)
        + wire.u32(wire.MAGIC)
        + wire.u8(wire.Opcode.PING)
        + wire.u32(wire.PROBE)
    )
    answer = int.from_bytes(connection.receive(4), "little")
    if answer == wire.TOKEN_REFUSED:
        why = "it requires a token; pass one (--token-file or RALLYPOINT_TOKEN)"
        raise _refusal(connection, why)
    if answer not in {wire.PROBE, wire.PROBE_ANSWER}:
        raise ConnectionError(
            f"the program listening there is not a store: it answered {answer:#x}"
        )
    connection.ours = answer == wire.PROBE_ANSWER


def _refusal(connection: Connection, why: str) -> StoreRefusedError:
    """The server is there and will not have us; trying again is no use."""
    return StoreRefusedError(
        f"the store at {connection.endpoint} refused the connection: {why}",
        endpoint=connection.endpoint,
        operation="connect",
    )


def _addresses(host: str, port: int) -> list[Address]:
    if family := numeric_family(host):
        return [(family, (host, port))]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]


_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_child() -> None:
    for connection in list(_open_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
