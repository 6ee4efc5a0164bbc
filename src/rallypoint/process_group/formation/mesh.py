"""Connects a rank with those on other hosts: a few connections to each, made while a group forms.

In a group of many hosts there are at first only control connections, with the neighbours in a graph
(`neighbours`); the others are made when needed (native/engine/tcp/late_connections.h).

    caller (the higher rank)                   listener (the lower rank)
    GREETING, its rank, what for, 32 random bytes   ->
                                               <-   32 random bytes
    HMAC-SHA256(key, "client", both)           ->
                                               <-   HMAC-SHA256(key, "server", both)

The key depends on the group's secret, which its first rank drew, on the job's token, and on the
group's name (run, round and number). It also depends on both ranks and the connection's purpose. So
a connection of another group or an earlier round is never accepted. Strangers are dropped, and
delay no rank. The engine uses the connections afterwards.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rallypoint.base.address import endpoint_of
from rallypoint.base.errors import CollectiveTimeoutError, HostError, PeerLostError
from rallypoint.base.port_range import bind_free
from rallypoint.base.ready import call_ready
from rallypoint.base.worker_env import read_silence
from rallypoint.engine.communicator import FarPeer, LateMesh
from rallypoint.process_group.formation.host_network import Congestion, NetworkDiagnosis, make_room
from rallypoint.store.token import ChallengeError, Steps, examine, prove


def neighbours(rank: int, ranks: int) -> list[int]:
    """The ranks to which this one has a control connection from the start, in order.

    Rank r is connected with r - d and r + d for each power of two d, modulo the number of ranks:
    with 15 others of 256, with 19 of 1,024. Each rank passes on the news of a death once. It
    reaches every other rank after a few steps (at most 4 of 256, 5 of 1,024), and by several paths,
    so that a few more deaths do not stop it. The placement of ranks on hosts does not matter.
    """
    found = set()
    distance = 1
    while distance < ranks:
        found |= {(rank + distance) % ranks, (rank - distance) % ranks}
        distance *= 2
    return sorted(found - {rank})


GREETING = b"RLYMSH1\n"
_HEAD = struct.Struct("<II")
_CHECK_EVERY_S = 1.0
_MOST_PROBES = 100  # the kernel's limit is 127
# A host whose cable was plugged in again cannot be reached until it has been looked up anew.
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_NO_ROUTE_S, _CALL_EVERY_S = 4.0, 0.2
_DIAGNOSIS_S = 3.0  # before the deadline; it takes up to two seconds
_STRANGER_S = 5.0  # how long a caller may take to prove its identity
_MOST_STRANGERS = 256
_MOST_REFUSALS = 5  # of one peer: more are not because strangers crowd its listener
_CONTROL, _MAIL, _DATA = 0, 1, 2  # and on


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where a rank listens, the name of its process there, and how the address was chosen."""

    address: str
    port: int
    pid: int
    network: str = ""


@dataclass(frozen=True, slots=True)
class Pass:
    """What identifies the connections of a group."""

    name: str
    secret: bytes
    token: bytes

    def key(self, caller: int, listener: int, purpose: int) -> bytes:
        """The key of one connection."""
        text = f"{self.name}/{caller}/{listener}/{purpose}".encode()
        return hmac.digest(self.group_secret, text, "sha256")

    @property
    def group_secret(self) -> bytes:
        """A secret that only members with the job's token know."""
        return self.secret + hashlib.sha256(self.token).digest()


def listen(address: str, congestion: Congestion) -> socket.socket:
    """A listener at an address of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = bind_free(
            lambda port: socket.create_server((address, port), family=family, backlog=4096)
        )
    except OSError as error:
        raise HostError(
            f"cannot listen at {address} ({error.strerror}); name another interface with "
            "RALLYPOINT_SOCKET_IFNAME"
        ) from None
    congestion.prepare(listener)
    return listener


class _Handshake:
    """One connection, until both sides have proved themselves."""

    def __init__(self, sock: socket.socket, steps: Steps) -> None:
        self.sock = sock
        self.until = float("inf")
        self._steps = steps
        self._unread = b""
        self.unsent, self._needed = next(steps)

    def proceed(self) -> bool:
        """Send and receive as much as possible; returns whether the handshake is over."""
        with suppress(BlockingIOError):
            while self.unsent or self._needed:
                if self.unsent:
                    self.unsent = self.unsent[self.sock.send(self.unsent) :]
                    continue
                data = self.sock.recv(self._needed - len(self._unread))
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                self._unread += data
                if len(self._unread) == self._needed:
                    data, self._unread = self._unread, b""
                    try:
                        self.unsent, self._needed = self._steps.send(data)
                    except StopIteration:
                        self._needed = 0
            return True
        return False


class Mesh:
    """The connections of a rank with those on other hosts, in progress and made; for one use.

    Args:
        listener: where this rank listens; closed afterwards, or passed on.
        members: the ranks' names in messages.
        deadline: of time.monotonic().
        check: called every second; raises PeerLostError if a rank has gone.
        diagnosis: started if a rank is not connected shortly before the deadline, or cannot be.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        rank: int,
        members: Sequence[int],
        admission: Pass,
        congestion: Congestion,
        deadline: float,
        check: Callable[[], None],
        diagnosis: NetworkDiagnosis,
    ) -> None:
        self.made: dict[tuple[int, int], socket.socket] = {}
        self._listener = listener
        self._rank = rank
        self._members = members
        self._pass = admission
        self._congestion = congestion
        self._deadline = deadline
        self._check = check
        self._diagnosis = diagnosis
        self._addresses: Mapping[int, RankAddress] = {}
        self._purposes = 0
        self._silence_s = read_silence(os.environ)
        self._strangers: dict[_Handshake, None] = {}  # the oldest first
        self._refusals: Counter[int] = Counter()  # by peer: connections that it closed
        self._began = time.monotonic()
        self._calls: list[tuple[float, int, int]] = []  # to be made then
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def connect_all(self, addresses: Mapping[int, RankAddress], streams: int) -> list[FarPeer]:
        """Connect with each of these ranks, by `streams` data connections each."""
        connections = len(addresses) * (_DATA + streams)
        try:
            make_room(connections, connections, ranks=len(addresses))
            self._run(addresses, _DATA + streams)
            return [
                FarPeer(
                    peer,
                    where.pid,
                    self.made[peer, _CONTROL].detach(),
                    self.made[peer, _MAIL].detach(),
                    [self.made[peer, _DATA + stream].detach() for stream in range(streams)],
                )
                for peer, where in sorted(addresses.items())
            ]
        finally:
            self._close()

    def connect_neighbours(
        self, addresses: Mapping[int, RankAddress], far: Collection[int], streams: int
    ) -> tuple[list[FarPeer], LateMesh]:
        """Make the control connections with this rank's neighbours; others are made when needed.

        Args:
            addresses: of all ranks, including this one.
            far: ranks on other hosts.
        """
        near = neighbours(self._rank, len(addresses))
        needed = len(near) + 1
        try:
            make_room(needed, len(far) * (_DATA + streams) + needed, ranks=len(near))
            self._run({peer: addresses[peer] for peer in near}, 1)
            self._selector.unregister(self._listener)
            listens_at = self._listener.detach()
            made = [(peer, self.made[peer, _CONTROL].detach()) for peer in near]
        finally:
            self._close()
        late = LateMesh(
            listens_at,
            self._pass.group_secret,
            self._pass.name,
            streams,
            *self._congestion.names,
            self._silence_s,
            [(peer, where.address, where.port) for peer, where in sorted(addresses.items())],
            made,
        )
        return [FarPeer(peer, addresses[peer].pid, -1, -1, []) for peer in sorted(far)], late

    def _run(self, addresses: Mapping[int, RankAddress], purposes: int) -> None:
        """Call the lower ranks and wait for the higher ones."""
        self._addresses, self._purposes, deadline = addresses, purposes, self._deadline
        for peer in self._addresses:
            if peer < self._rank:
                for purpose in range(self._purposes):
                    self._call(peer, purpose)
        checked = time.monotonic()
        diagnose_at = deadline - min(_DIAGNOSIS_S, (deadline - checked) / 2)
        while len(self.made) < len(self._addresses) * self._purposes:
            now = time.monotonic()
            if now > deadline:
                raise self._late()
            if now > diagnose_at:
                diagnose_at = deadline
                peer = self._missing()[0]  # its reason is sought while all are still running
                where, is_caller = addresses[peer], peer < self._rank
                role = self._role(peer)
                self._diagnosis.begin(where.address, where.port, role=role, is_caller=is_caller)
            if now - checked > _CHECK_EVERY_S:
                self._check()
                checked = now
            self._call_due(now)
            wait_s = min(deadline - now, max(diagnose_at - now, 0.0), 1.0)
            if self._calls:
                wait_s = min(wait_s, _CALL_EVERY_S)
            call_ready(self._selector, wait_s)
            for handshake in [each for each in self._strangers if each.until < now]:
                self._drop(handshake)

    def _close(self) -> None:
        """Close what was not passed on."""
        for key in list(self._selector.get_map().values()):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            sock.close()
        self._selector.close()
        for sock in self.made.values():
            sock.close()

    # The caller's side.

    def _call(self, peer: int, purpose: int) -> None:
        where = self._addresses[peer]
        who = f"rank {self._members[peer]} at {endpoint_of(where.address, where.port)}"
        family = socket.AF_INET6 if ":" in where.address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._congestion.prepare(sock)
        sock.setblocking(False)
        code = sock.connect_ex((where.address, where.port))
        greeting = GREETING + _HEAD.pack(self._rank, purpose)
        handshake = _Handshake(sock, prove(self._pass.key(self._rank, peer, purpose), greeting))
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._call_later(peer, purpose, code)
            return

        def happened() -> None:
            try:
                if not handshake.proceed():
                    self._watch(handshake, happened)
                    return
            except OSError as error:
                is_refused = error.errno == errno.ECONNRESET
                self._refusals[peer] += is_refused
                if is_refused and self._refusals[peer] > _MOST_REFUSALS:
                    raise PeerLostError(
                        f"{who} exited or refused this rank while the group was forming; look "
                        "for its first error, and check that RALLYPOINT_TOKEN is the same on all "
                        "hosts",
                        rank=self._members[peer],
                        operation="init_process_group",
                    ) from None
                self._selector.unregister(sock)
                sock.close()
                self._call_later(peer, purpose, error.errno)
                return
            except ChallengeError:
                raise HostError(
                    f"{who} has a different token; set the same RALLYPOINT_TOKEN on all hosts"
                ) from None
            self._finish(handshake, peer, purpose)

        self._selector.register(sock, selectors.EVENT_WRITE, happened)

    def _call_later(self, peer: int, purpose: int, code: int | None) -> None:
        """Try again soon if there is no route, or strangers crowd the listener; otherwise raise."""
        now = time.monotonic()
        may_pass = code in _NO_ROUTE and now <= self._began + _NO_ROUTE_S
        if not may_pass and code != errno.ECONNRESET:
            why = None if code is None else os.strerror(code)
            raise self._unreachable(peer, why) from None
        self._calls.append((now + _CALL_EVERY_S, peer, purpose))

    def _call_due(self, now: float) -> None:
        due = [call for call in self._calls if call[0] <= now]
        self._calls = [call for call in self._calls if call[0] > now]
        for _, peer, purpose in due:
            self._call(peer, purpose)

    # The listener's side.

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= _MOST_STRANGERS + len(self._addresses) * self._purposes:
            self._drop(next(iter(self._strangers)))
        sock.setblocking(False)
        found: list[tuple[int, int]] = []

        def key_for(greeting: bytes) -> bytes:
            caller, purpose = _HEAD.unpack_from(greeting, len(GREETING))
            is_awaited = self._rank < caller and caller in self._addresses
            is_new = purpose < self._purposes and (caller, purpose) not in self.made
            if not (greeting.startswith(GREETING) and is_awaited and is_new):
                raise ChallengeError
            found.append((caller, purpose))
            return self._pass.key(caller, self._rank, purpose)

        handshake = _Handshake(sock, examine(len(GREETING) + _HEAD.size, key_for))
        handshake.until = time.monotonic() + _STRANGER_S
        self._strangers[handshake] = None

        def happened() -> None:
            try:
                if handshake.proceed():
                    self._strangers.pop(handshake, None)
                    self._finish(handshake, *found[0])
                else:
                    self._watch(handshake, happened)
            except (OSError, ChallengeError):
                self._drop(handshake)

        self._selector.register(sock, selectors.EVENT_READ, happened)

    def _drop(self, handshake: _Handshake) -> None:
        self._strangers.pop(handshake, None)
        self._selector.unregister(handshake.sock)
        handshake.sock.close()

    # Both.

    def _watch(self, handshake: _Handshake, happened: Callable[[], None]) -> None:
        events = selectors.EVENT_WRITE if handshake.unsent else selectors.EVENT_READ
        self._selector.modify(handshake.sock, events, happened)

    def _finish(self, handshake: _Handshake, peer: int, purpose: int) -> None:
        self._selector.unregister(handshake.sock)
        if (peer, purpose) in self.made:
            handshake.sock.close()
            return
        handshake.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._congestion.settle(handshake.sock)
        if purpose == _CONTROL:
            _watch_for_silence(handshake.sock, self._silence_s)
        self.made[peer, purpose] = handshake.sock

    def _late(self) -> CollectiveTimeoutError:
        missing = self._missing()
        named = ", ".join(
            f"{self._members[peer]} at {endpoint_of(self._addresses[peer].address, 0)[:-2]}"
            for peer in missing[:16]
        )
        first = self._addresses[missing[0]].network
        return CollectiveTimeoutError(
            f"init_process_group: no connection to rank {named}{f' ({first})' if first else ''};"
            " check for a firewall between the hosts, or choose another network with"
            " RALLYPOINT_SOCKET_IFNAME",
            rank=self._members[missing[0]],
            operation="init_process_group",
        )

    def _missing(self) -> list[int]:
        return [
            peer
            for peer in sorted(self._addresses)
            if any((peer, purpose) not in self.made for purpose in range(self._purposes))
        ]

    def _unreachable(self, peer: int, why: str | None) -> HostError:
        where = self._addresses[peer]
        self._diagnosis.run(where.address, where.port, role=self._role(peer))
        endpoint = endpoint_of(where.address, where.port)
        reasons = "; ".join(filter(None, (why, where.network)))
        error = HostError(
            f"cannot connect to rank {self._members[peer]} at {endpoint} ({reasons}); check that "
            "the rank is still running and that no firewall blocks the connection, or choose "
            "another network with RALLYPOINT_SOCKET_IFNAME"
        )
        error.rank = self._members[peer]
        return error

    def _role(self, peer: int) -> str:
        return f"where rank {self._members[peer]} listens"


def _watch_for_silence(sock: socket.socket, seconds: int) -> None:
    """Have the kernel end a connection whose other host is silent for this long.

    native/engine/tcp/late_connections.cc does the same.
    """
    every_s = -(-seconds // _MOST_PROBES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, seconds // every_s - 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
