"""The other end of a probe: counts the bytes that arrive, and reports the number."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable

from rallypoint.base.port_range import bind_free
from rallypoint.doctor.probe import (
    GREETING,
    HEAD,
    RECEIVED,
    STALL_S,
    TALK_S,
    receive,
)
from rallypoint.store.token import NONCE, PROOF, client_proof, server_proof

_MOST_AT_ONCE = 256
_MOST_PINGS = 64
_MOST_BYTES = 1 << 18
_BACKLOG = 128


class TokenRefusedError(OSError):
    """A caller has a different token."""


class ProbeListener:
    """Listens at a port of the port range, and at endpoints on this node that are free. A context
    manager.

    Raises:
        HostError: all ports of the port range are taken.
        OSError: listening is not possible on this machine.
    """

    def __init__(self) -> None:
        self._secret = b""
        self._sockets: list[socket.socket] = []
        self._places = threading.Semaphore(_MOST_AT_ONCE)
        first = bind_free(listen)
        self.port: int = first.getsockname()[1]
        self._begin(first, self._answer)

    def __enter__(self) -> ProbeListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allow(self, secret: bytes) -> None:
        """Admit callers that know the secret; before this, nobody is admitted."""
        self._secret = secret

    def listen_too(self, port: int) -> None:
        """Listen at an endpoint as well, for callers that only connect.

        Raises:
            OSError: the port is taken.
        """
        self._begin(listen(port), lambda sock: None)

    def close(self) -> None:
        """Stop listening."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _begin(self, sock: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        self._sockets.append(sock)
        threading.Thread(target=self._accept, args=(sock, answer), daemon=True).start()

    def _accept(self, sock: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        while True:
            self._places.acquire()
            try:
                caller, _ = sock.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(caller, answer), daemon=True).start()

    def _serve(self, caller: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        try:
            with caller, contextlib.suppress(OSError):
                caller.settimeout(TALK_S)
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                answer(caller)
        finally:
            self._places.release()

    def _answer(self, caller: socket.socket) -> None:
        if not self._secret:
            return
        admit(caller, self._secret)
        pings, count, milliseconds = HEAD.unpack(receive(caller, HEAD.size))
        for _ in range(min(pings, _MOST_PINGS)):
            caller.sendall(receive(caller, 1))
        caller.sendall(RECEIVED.pack(*_count(caller, count, milliseconds / 1000)))
        _read_rest(caller)


def listen(port: int) -> socket.socket:
    """A socket that listens at all addresses of this machine.

    Raises:
        OSError: the port is taken.
    """
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)


def admit(caller: socket.socket, token: bytes) -> None:
    """Take the listener's part in the challenge.

    Raises:
        TokenRefusedError: the caller has a different token.
        OSError: the connection broke, or the caller is another program.
    """
    greeting = receive(caller, len(GREETING) + NONCE)
    theirs, ours = greeting[len(GREETING) :], os.urandom(NONCE)
    if not greeting.startswith(GREETING):
        raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
    caller.sendall(ours)
    if not hmac.compare_digest(receive(caller, PROOF), client_proof(token, theirs, ours)):
        caller.sendall(bytes(PROOF))  # not a proof, which would help a stranger to guess the token
        raise TokenRefusedError
    caller.sendall(server_proof(token, theirs, ours))


def _count(caller: socket.socket, count: int, stream_s: float) -> tuple[int, int]:
    """The number of bytes received, and the microseconds from the first ones on."""
    caller.settimeout(STALL_S)
    total, began, until = 0, 0.0, 0.0
    while not count or total < count:
        try:
            data = caller.recv(_MOST_BYTES)
        except TimeoutError:
            break
        if not data:
            break
        now = time.perf_counter()
        if not began:
            began, until = now, now + stream_s
            if stream_s:
                continue  # data from before the clock started does not count
        total += len(data)
        if stream_s and now >= until:
            break
    return total, round((time.perf_counter() - began) * 1e6) if began else 0


def _read_rest(caller: socket.socket) -> None:
    """Read what is still in transit: closing earlier would reset the connection before the caller
    reads our reply.
    """
    until = time.monotonic() + STALL_S
    while time.monotonic() < until and caller.recv(_MOST_BYTES):
        pass
