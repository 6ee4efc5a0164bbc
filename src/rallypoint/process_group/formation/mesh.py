"""Connects a rank with those on other hosts: a few connections to each, made while a group forms.

In a group of many hosts there are at first only control connections, with the neighbours in a graph
(`neighbours`); the others are made when needed (native/engine/tcp/late_connections.h).

    caller (the higher rank)                   listener (the lower rank)
    GREETING, its rank, what for, 32 random bytes   ->
                                               <-   32 random bytes
    HMAC-SHA256(key, "client", both)           ->
                                               <-   HMAC-SHA256(key, "server", both)

The key depends on the group's secret, which its first rank drew, on the job's token, and on the
group's name (run, round and number), both ranks and the connection's purpose, so a connection of
another group or an earlier round is never accepted. Strangers are dropped, and delay nobody. The
engine uses the connections afterwards.
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
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rallypoint.base.address import endpoint_of
from rallypoint.base.errors import CollectiveTimeoutError, HostError, PeerLostError
from rallypoint.base.port_range import bind_free
from rallypoint.base.worker_env import read_silence
from rallypoint.engine.communicator import FarPeer, LateMesh
from rallypoint.process_group.formation.explain_network import NetworkLook
from rallypoint.process_group.formation.host_network import Congestion, make_room
from rallypoint.store.token import NONCE, PROOF, client_proof, is_server_proof, server_proof


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
# A host whose cable was plugged in again cannot be reached until it was looked for anew.
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_NO_ROUTE_S, _CALL_EVERY_S = 4.0, 0.2
_LOOK_S = 3.0  # before the deadline; a look takes up to two seconds
_STRANGER_S = 5.0  # how long somebody may take to prove himself
_MOST_STRANGERS = 256
_MOST_REFUSALS = 5  # of connections to one peer, before it counts as an answer
_CONTROL, _MAIL, _DATA = 0, 1, 2  # and on

# What to send, and how many bytes then to wait for; 0 once it is over.
Step: TypeAlias = tuple[bytes, int]


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


class _RefusedError(Exception):
    """The other side is not the expected one."""


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


def connect_all(
    listener: socket.socket,
    *,
    rank: int,
    places: Mapping[int, RankAddress],
    members: Sequence[int],
    admission: Pass,
    streams: int,
    congestion: Congestion,
    deadline: float,
    check: Callable[[], None],
    look: NetworkLook,
) -> list[FarPeer]:
    """Connect with each of `places`, by rank; the listener is closed.

    Args:
        members: the ranks' names in messages.
        streams: the number of data connections with each rank.
        deadline: of time.monotonic().
        check: called every second; raises PeerLostError if a rank has gone.
        look: started if a rank is not connected shortly before the deadline, or cannot be.
    """
    connections = len(places) * (_DATA + streams)
    make_room(connections, connections, ranks=len(places))
    mesh = _Mesh(listener, rank, places, members, admission, _DATA + streams, congestion, look)
    try:
        mesh.run(deadline, check)
        return [
            FarPeer(
                peer,
                place.pid,
                mesh.made[peer, _CONTROL].detach(),
                mesh.made[peer, _MAIL].detach(),
                [mesh.made[peer, _DATA + stream].detach() for stream in range(streams)],
            )
            for peer, place in sorted(places.items())
        ]
    finally:
        mesh.close()


def connect_neighbours(
    listener: socket.socket,
    *,
    rank: int,
    places: Mapping[int, RankAddress],
    far: Collection[int],
    members: Sequence[int],
    admission: Pass,
    streams: int,
    congestion: Congestion,
    deadline: float,
    check: Callable[[], None],
    look: NetworkLook,
) -> tuple[list[FarPeer], LateMesh]:
    """Make the control connections with this rank's neighbours; others are made when needed.

    Args:
        places: of all ranks, including this one.
        far: ranks on other hosts.
        members, streams, deadline, check, look: as in `connect_all`.
    """
    near = neighbours(rank, len(places))
    make_room(len(near) + 1, len(far) * (_DATA + streams) + len(near) + 1, ranks=len(near))
    known = {peer: places[peer] for peer in near}
    mesh = _Mesh(listener, rank, known, members, admission, 1, congestion, look)
    try:
        mesh.run(deadline, check)
        listens_at = mesh.keep_listener()
        made = [(peer, mesh.made[peer, _CONTROL].detach()) for peer in near]
    finally:
        mesh.close()
    late = LateMesh(
        listens_at,
        admission.group_secret,
        admission.name,
        streams,
        *congestion.names,
        read_silence(os.environ),
        [(peer, place.address, place.port) for peer, place in sorted(places.items())],
        made,
    )
    return [FarPeer(peer, places[peer].pid, -1, -1, []) for peer in sorted(far)], late


class _Talk:
    """One connection, until both sides have proved themselves."""

    def __init__(self, sock: socket.socket, steps: Generator[Step, bytes, None], who: str) -> None:
        self.sock = sock
        self.who = who
        self.unsent = b""
        self.until = float("inf")
        self._steps = steps
        self._unread = b""
        self._needed = 0
        self._take(next(steps))

    def _take(self, step: Step) -> None:
        self.unsent += step[0]
        self._needed = step[1]

    def go_on(self) -> bool:
        """Send and receive as much as possible; returns whether the handshake is over."""
        while True:
            if self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]
                if self.unsent:
                    return False
            if self._needed == 0:
                return True
            data = self.sock.recv(self._needed - len(self._unread))
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            self._unread += data
            if len(self._unread) == self._needed:
                data, self._unread = self._unread, b""
                try:
                    self._take(self._steps.send(data))
                except StopIteration:
                    self._needed = 0


class _Mesh:
    """All connections of a rank, in progress and made."""

    def __init__(
        self,
        listener: socket.socket,
        rank: int,
        places: Mapping[int, RankAddress],
        members: Sequence[int],
        admission: Pass,
        purposes: int,
        congestion: Congestion,
        look: NetworkLook,
    ) -> None:
        self.made: dict[tuple[int, int], socket.socket] = {}
        self._listener = listener
        self._rank = rank
        self._places = places
        self._members = members
        self._pass = admission
        self._purposes = purposes
        self._congestion = congestion
        self._look = look
        self._silence_s = read_silence(os.environ)
        self._strangers: dict[_Talk, None] = {}  # the oldest first
        self._refusals: Counter[int] = Counter()  # by peer: connections that it closed
        self._began = time.monotonic()
        self._calls: list[tuple[float, int, int]] = []  # to be made then
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self, deadline: float, check: Callable[[], None]) -> None:
        """Call the lower ranks and wait for the higher ones."""
        for peer in self._places:
            if peer < self._rank:
                for purpose in range(self._purposes):
                    self._call(peer, purpose)
        checked = time.monotonic()
        look_at = deadline - min(_LOOK_S, (deadline - checked) / 2)
        while len(self.made) < len(self._places) * self._purposes:
            now = time.monotonic()
            if now > deadline:
                raise self._late()
            if now > look_at:
                look_at = deadline
                self._begin_look()
            if now - checked > _CHECK_EVERY_S:
                check()
                checked = now
            self._call_due(now)
            wait_s = min(deadline - now, max(look_at - now, 0.0), 1.0)
            if self._calls:
                wait_s = min(wait_s, _CALL_EVERY_S)
            for key, _ in self._selector.select(wait_s):
                happened: Callable[[], None] = key.data
                happened()
            for talk in [each for each in self._strangers if each.until < now]:
                self._drop(talk)

    def keep_listener(self) -> int:
        """The listener's descriptor, which is then not closed."""
        self._selector.unregister(self._listener)
        return self._listener.detach()

    def close(self) -> None:
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
        place = self._places[peer]
        who = f"rank {self._members[peer]} at {endpoint_of(place.address, place.port)}"
        family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._congestion.prepare(sock)
        sock.setblocking(False)
        code = sock.connect_ex((place.address, place.port))
        talk = _Talk(sock, self._prove(peer, purpose), who)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._call_later(peer, purpose, code)
            return

        def happened() -> None:
            try:
                if not talk.go_on():
                    self._watch(talk, happened)
                    return
            except BlockingIOError:
                self._watch(talk, happened)
                return
            except OSError as error:
                if error.errno == errno.ECONNRESET and self._is_refused_again(peer):
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
            except _RefusedError:
                raise HostError(
                    f"{who} has a different token; set the same RALLYPOINT_TOKEN on all hosts"
                ) from None
            self._finish(talk, peer, purpose)

        self._selector.register(sock, selectors.EVENT_WRITE, happened)

    def _is_refused_again(self, peer: int) -> bool:
        """Whether it has closed so many connections that strangers cannot be the reason."""
        self._refusals[peer] += 1
        return self._refusals[peer] > _MOST_REFUSALS

    def _call_later(self, peer: int, purpose: int, code: int | None) -> None:
        """If there is no route, or strangers crowd the listener, perhaps it is better soon."""
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

    def _prove(self, peer: int, purpose: int) -> Generator[Step, bytes, None]:
        key = self._pass.key(self._rank, peer, purpose)
        ours = os.urandom(NONCE)
        theirs = yield GREETING + _HEAD.pack(self._rank, purpose) + ours, NONCE
        proof = yield client_proof(key, ours, theirs), PROOF
        if not is_server_proof(proof, key, ours, theirs):
            raise _RefusedError

    # The listener's side.

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= _MOST_STRANGERS + len(self._places) * self._purposes:
            self._drop(next(iter(self._strangers)))
        sock.setblocking(False)
        found: list[tuple[int, int]] = []
        talk = _Talk(sock, self._examine(found), "")
        talk.until = time.monotonic() + _STRANGER_S
        self._strangers[talk] = None

        def happened() -> None:
            try:
                if talk.go_on():
                    self._strangers.pop(talk, None)
                    self._finish(talk, *found[0])
                else:
                    self._watch(talk, happened)
            except BlockingIOError:
                self._watch(talk, happened)
            except (OSError, _RefusedError):
                self._drop(talk)

        self._selector.register(sock, selectors.EVENT_READ, happened)

    def _examine(self, found: list[tuple[int, int]]) -> Generator[Step, bytes, None]:
        data = yield b"", len(GREETING) + _HEAD.size + NONCE
        caller, purpose = _HEAD.unpack_from(data, len(GREETING))
        theirs, ours = data[len(GREETING) + _HEAD.size :], os.urandom(NONCE)
        is_awaited = caller in self._places and caller > self._rank and purpose < self._purposes
        if data[: len(GREETING)] != GREETING or not is_awaited:
            raise _RefusedError
        key = self._pass.key(caller, self._rank, purpose)
        proof = yield ours, PROOF
        if not hmac.compare_digest(proof, client_proof(key, theirs, ours)):
            raise _RefusedError
        if (caller, purpose) in self.made or found:
            raise _RefusedError
        found.append((caller, purpose))
        yield server_proof(key, theirs, ours), 0

    def _drop(self, talk: _Talk) -> None:
        self._strangers.pop(talk, None)
        self._selector.unregister(talk.sock)
        talk.sock.close()

    # Both.

    def _watch(self, talk: _Talk, happened: Callable[[], None]) -> None:
        events = selectors.EVENT_WRITE if talk.unsent else selectors.EVENT_READ
        self._selector.modify(talk.sock, events, happened)

    def _finish(self, talk: _Talk, peer: int, purpose: int) -> None:
        self._selector.unregister(talk.sock)
        if (peer, purpose) in self.made:
            talk.sock.close()
            return
        talk.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._congestion.settle(talk.sock)
        if purpose == _CONTROL:
            _watch_for_silence(talk.sock, self._silence_s)
        self.made[peer, purpose] = talk.sock

    def _late(self) -> CollectiveTimeoutError:
        missing = self._missing()
        named = ", ".join(
            f"{self._members[peer]} at {endpoint_of(self._places[peer].address, 0)[:-2]}"
            for peer in missing[:16]
        )
        first = self._places[missing[0]].network
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
            for peer in sorted(self._places)
            if any((peer, purpose) not in self.made for purpose in range(self._purposes))
        ]

    def _unreachable(self, peer: int, why: str | None) -> HostError:
        place = self._places[peer]
        self._look.look(place.address, place.port, role=self._role(peer))
        where = endpoint_of(place.address, place.port)
        reasons = "; ".join(filter(None, (why, place.network)))
        error = HostError(
            f"cannot connect to rank {self._members[peer]} at {where} ({reasons}); check that the "
            "rank is still running and that no firewall blocks the connection, or choose another "
            "network with RALLYPOINT_SOCKET_IFNAME"
        )
        error.rank = self._members[peer]
        return error

    def _begin_look(self) -> None:
        """Find out why one is missing, while all are still running."""
        peer = self._missing()[0]
        place, is_caller = self._places[peer], peer < self._rank
        self._look.begin(place.address, place.port, role=self._role(peer), is_caller=is_caller)

    def _role(self, peer: int) -> str:
        return f"where rank {self._members[peer]} listens"


def _watch_for_silence(sock: socket.socket, seconds: int) -> None:
    """Have the kernel end a connection whose other host is silent for so long.

    native/engine/tcp/late_connections.cc does the same.
    """
    every_s = -(-seconds // _MOST_PROBES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, seconds // every_s - 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
