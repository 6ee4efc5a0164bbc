"""How well one node reaches another: connecting, small messages, a large one, and a stream of them.

    caller                                             ProbeListener
    the challenge of store/token.py, with the secret of this examination
    how many small messages, how many bytes
    afterwards, and for how long              ->
    small messages, a byte each               ->  <-   the byte
    the bytes                                 ->  <-   how many came, in how many microseconds

Only one direction carries much data, so each direction between two nodes is measured by itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rallypoint.base.port_range import bind_free
from rallypoint.doctor.cluster_facts import SLOW_MBIT_S, ConnectOutcome, EndpointProbe, Probe
from rallypoint.doctor.collect import NAME_S, begin, look_up
from rallypoint.store import token as challenge
from rallypoint.store.token import REFUSAL, ChallengeError

GREETING = b"RLYEXAM1"
# The number of small messages; the number of bytes, or 0 for a stream; the stream's milliseconds.
HEAD = struct.Struct("<IQI")
RECEIVED = struct.Struct("<QQ")  # bytes, microseconds
_PINGS = 8
LARGE = 64 << 10
CONNECT_S = 1.5
STALL_S = 1.5
TALK_S = 5.0  # limit for a small message to a node that may be busy
STREAM_S = 0.2
_ROUND_TRIPS = 20  # the least length of a stream, in round trips: it starts slowly
_LONGEST_STREAM_S = 2.0
_TRIES = 3
_MOST_STREAMS = 8  # for each node, so that many nodes take no longer
_CHUNK = bytes(1 << 18)
_MOST_AT_ONCE = 64
_MOST_ADDRESSES = 2
# A listener's.
_MOST_CALLERS = 256
_MOST_PINGS = 64
_MOST_BYTES = 1 << 18
_BACKLOG = 128


class TokenRefusedError(OSError):
    """A caller has a different token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A node to reach: the address that it gives to others, and its other addresses."""

    number: int
    address: str
    port: int
    others: tuple[str, ...] = ()


def probe_all(me: int, targets: Sequence[Target], secret: bytes) -> list[Probe]:
    """Probe all targets: concurrently with small and large messages, one after the other with
    streams.

    Node i begins with node i + 1, so that each node sends to one node and receives from one at a
    time.
    """
    limit = threading.Semaphore(_MOST_AT_ONCE)

    def reach(target: Target) -> Probe:
        with limit:
            return _reach(me, target, secret_of(secret, target.number))

    probes = begin([partial(reach, target) for target in targets], None)().values()
    found = {probe.target: probe for probe in probes}
    count = 1 + max([me, *(target.number for target in targets)])
    for target in sorted(targets, key=lambda each: (each.number - me) % count)[:_MOST_STREAMS]:
        probe = found[target.number]
        if probe.latency_us and not probe.stalls:
            address = probe.other_address or target.address
            stream_s = STREAM_S + _ROUND_TRIPS * probe.latency_us / 1e6
            own = secret_of(secret, target.number)
            mbit_s = _stream(address, target.port, own, min(stream_s, _LONGEST_STREAM_S))
            found[target.number] = replace(probe, mbit_s=mbit_s)
    return [found[target.number] for target in targets]


def probe_endpoint(
    me: int, host: str, port: int, wait_s: float = CONNECT_S, name_s: float = NAME_S
) -> EndpointProbe:
    """Whether something listens at an endpoint."""
    probe = partial(EndpointProbe, source=me, host=host, port=port)
    lookup = look_up(host, name_s)
    if lookup.error:
        return probe(outcome=ConnectOutcome.UNKNOWN, detail=lookup.error)
    tried = lookup.addresses[:_MOST_ADDRESSES]
    found = begin([partial(connect, address, port, wait_s) for address in tried], None)()
    for sock, _, _ in found.values():
        if sock is not None:
            sock.close()
    reached = [at for at, (sock, _, _) in found.items() if sock is not None]
    _, outcome, detail = found[min(reached, default=0)]
    return probe(outcome=outcome, detail=detail)


def probe_endpoints(
    me: int, endpoints: Sequence[tuple[str, int]], wait_s: float = CONNECT_S, name_s: float = NAME_S
) -> list[EndpointProbe]:
    """Whether something listens at each of several endpoints, all tried at once."""
    work = [partial(probe_endpoint, me, host, port, wait_s, name_s) for host, port in endpoints]
    return [probe for _, probe in sorted(begin(work, None)().items())]


def connect(
    address: str, port: int, wait_s: float
) -> tuple[socket.socket | None, ConnectOutcome, str]:
    """A connection, or the way in which connecting failed, with the system's error text."""
    try:
        sock = socket.create_connection((address, port), wait_s)
    except ConnectionRefusedError as error:
        return None, ConnectOutcome.REFUSED, error.strerror or ""
    except TimeoutError:
        return None, ConnectOutcome.DROPPED, f"no answer within {wait_s:g} s"
    except OSError as error:
        return None, ConnectOutcome.UNREACHABLE, error.strerror or str(error)
    sock.settimeout(TALK_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock, ConnectOutcome.REACHED, ""


def secret_of(secret: bytes, number: int) -> bytes:
    """The secret of one node of an examination: its address may also belong to another one."""
    return b"%s/%d" % (secret, number)


def prove(sock: socket.socket, token: bytes) -> bool:
    """Take the caller's part in the challenge; returns whether the other side knows the token."""
    try:
        _carry_out(challenge.prove(token, GREETING), sock)
    except ChallengeError:
        return False
    return True


def _carry_out(steps: challenge.Steps, sock: socket.socket) -> None:
    data, count = next(steps)
    with contextlib.suppress(StopIteration):
        while True:
            sock.sendall(data)
            data, count = steps.send(receive(sock, count))


def receive(sock: socket.socket, count: int) -> bytes:
    """Receive exactly that many bytes."""
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        data += part
    return data


def _reach(me: int, target: Target, secret: bytes) -> Probe:
    """Connect to a node, if necessary at another address, and send small and large messages."""
    address = target.address
    sock, outcome, detail = _meet(address, target.port, secret)
    probe = Probe(source=me, target=target.number, outcome=outcome, detail=detail)
    for other in target.others if sock is None else ():
        sock, _, _ = _meet(other, target.port, secret)
        if sock is not None:
            probe = replace(probe, other_address=other)
            break
    if sock is None:
        return probe
    try:
        latency_us, count = _exchange(sock)
        if not count:  # this machine may have been busy
            sock, _, _ = _meet(probe.other_address or address, target.port, secret)
            latency_us, count = _exchange(sock) if sock is not None else (latency_us, 0)
    except OSError as error:
        why = "it fell silent" if isinstance(error, TimeoutError) else error.strerror
        return replace(probe, outcome=ConnectOutcome.DROPPED, detail=why or str(error))
    return replace(probe, latency_us=latency_us, stalls=count == 0)


def _exchange(sock: socket.socket) -> tuple[float, int]:
    """Exchange messages; returns the latency, and how many bytes of a large one arrived."""
    with sock:
        sock.sendall(HEAD.pack(_PINGS, LARGE, 0))
        latency_us = min(_ping(sock) for _ in range(_PINGS))
        count, _ = _send(sock, 0.0)
    return latency_us, count


def _meet(
    address: str, port: int, secret: bytes
) -> tuple[socket.socket | None, ConnectOutcome, str]:
    """A connection to the node itself, or the reason why there is none."""
    sock, outcome, detail = connect(address, port, CONNECT_S)
    if sock is None:
        return None, outcome, detail
    try:
        if prove(sock, secret):
            return sock, outcome, detail
    except TimeoutError:
        outcome, detail = ConnectOutcome.DROPPED, "it was silent after connecting"
    except OSError as error:
        outcome, detail = ConnectOutcome.STRANGER, error.strerror or str(error)
    else:
        outcome = ConnectOutcome.STRANGER
    sock.close()
    return None, outcome, detail


def _ping(sock: socket.socket) -> float:
    """The time until the answer, in microseconds."""
    began = time.perf_counter()
    sock.sendall(b"p")
    receive(sock, 1)
    return (time.perf_counter() - began) * 1e6


def _send(sock: socket.socket, stream_s: float) -> tuple[int, int]:
    """Send a large message, or a stream for that long; returns bytes and microseconds."""
    until = time.monotonic() + stream_s
    sock.settimeout(STALL_S)
    # On a time-out, the other side reports what has arrived; after an error, it already has.
    with contextlib.suppress(TimeoutError, ConnectionError):
        if not stream_s:
            sock.sendall(_CHUNK[:LARGE])
        while time.monotonic() < until:
            sock.sendall(_CHUNK)
    if stream_s:
        sock.shutdown(socket.SHUT_WR)  # the listener's clock began later: it would wait for more
    sock.settimeout(STALL_S + stream_s + 1.0)
    count, microseconds = RECEIVED.unpack(receive(sock, RECEIVED.size))
    return count, microseconds


def _stream(address: str, port: int, secret: bytes, stream_s: float) -> float:
    """The rate in Mbit/s; 0 if it could not be measured."""
    best = 0.0
    for _ in range(_TRIES):
        sock, _, _ = connect(address, port, CONNECT_S)
        if sock is None:
            break
        with sock:
            try:
                if not prove(sock, secret):
                    break
                sock.sendall(HEAD.pack(0, 0, round(stream_s * 1000)))
                count, microseconds = _send(sock, stream_s)
                # Data still in transit must not disturb the next measurement.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            except OSError:
                continue
        best = max(best, 8 * count / microseconds if microseconds else 0.0)
        if best > SLOW_MBIT_S:
            break
    return best


# The listener.


class ProbeListener:
    """Listens for callers that know the secret, and at endpoints on this node that are free."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._sockets: list[socket.socket] = []
        self._free_slots = threading.Semaphore(_MOST_CALLERS)
        first = bind_free(listen)
        self.port: int = first.getsockname()[1]
        self._begin(first, self._answer)

    def listen_too(self, port: int) -> None:
        """Listen at an endpoint as well, for callers that only connect."""
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
            self._free_slots.acquire()
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
            self._free_slots.release()

    def _answer(self, caller: socket.socket) -> None:
        admit(caller, self._secret)
        pings, count, milliseconds = HEAD.unpack(receive(caller, HEAD.size))
        for _ in range(min(pings, _MOST_PINGS)):
            caller.sendall(receive(caller, 1))
        caller.sendall(RECEIVED.pack(*_count(caller, count, milliseconds / 1000)))
        _read_rest(caller)


def listen(port: int) -> socket.socket:
    """A socket that listens at all addresses of this machine."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)


def admit(caller: socket.socket, token: bytes) -> None:
    """Take the listener's part in the challenge."""

    def token_for(greeting: bytes) -> bytes:
        if greeting != GREETING:
            raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        return token

    try:
        _carry_out(challenge.examine(len(GREETING), token_for), caller)
    except ChallengeError:
        caller.sendall(REFUSAL)
        raise TokenRefusedError from None


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
    """Read what is in transit: closing earlier resets the connection before our reply is read."""
    until = time.monotonic() + STALL_S
    while time.monotonic() < until and caller.recv(_MOST_BYTES):
        pass
