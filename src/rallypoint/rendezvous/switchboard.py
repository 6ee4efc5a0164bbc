"""Connections with agents that are known by their keys: made when there is something to say.

    send(key, at, bytes): over a connection with that agent, else call it where it listens
    call(at, bytes): to whoever answers there

The first frame in each direction is the sender's key. Both sides may call at once; then both
connections stay. An agent counts as gone when it closed its last connection, as the kernel does for
a process that ends, or when another one answers where it listened; not when a connection broke on
the way or could not be made. It has a selector of its own, and is itself selectable.
"""

from __future__ import annotations

import selectors
import socket
import time
from abc import ABC, abstractmethod

from rallypoint.base.errors import HostError
from rallypoint.cluster.network import addresses_of
from rallypoint.rendezvous.link import Called, Caller, Ear, Link
from rallypoint.rendezvous.round import Endpoint

HANDSHAKE_S = 5.0
_MAX_KEY = 64
_MAX_WAITING = 32  # messages for one connection that is being made; all are said again anyway
_LOOKUP_REST = 20.0  # a name that nobody knew after a second is not asked for again for so long


class Receiver(ABC):
    """Who is told what comes of it."""

    @abstractmethod
    def heard(self, key: str, payload: bytes) -> None:
        """The agent with this key sent something."""

    @abstractmethod
    def gone(self, key: str, why: str) -> None:
        """The agent with this key has ended."""

    @abstractmethod
    def unreachable(self, at: Endpoint, why: str) -> None:
        """Nobody answers there, or not to us."""


class _Call:
    """A connection that is being made, and what waits for it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.began = time.monotonic()
        self.waiting: list[tuple[str | None, bytes]] = []  # for whom; None: whoever is there


class Switchboard(Ear):
    """All connections of one agent.

    Args:
        key: this agent's own.
        listener: where others call it; taken over.

    Attributes:
        wake_at: when to call `poll` even if nothing happens; None: never.
    """

    def __init__(self, key: str, token: bytes, listener: socket.socket, receiver: Receiver) -> None:
        self.wake_at: float | None = None
        self._key = key
        self._token = token
        self._receiver = receiver
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._keys: dict[Link, str] = {}  # of all that are proved; empty before the first frame
        self._links: dict[str, list[Link]] = {}  # by key
        self._strangers: dict[Link, float] = {}  # who called, and has not told its key; since when
        self._calls: dict[Endpoint, _Call] = {}
        self._who: dict[Endpoint, str] = {}  # who answered there, while connected
        self._found: dict[str, list[str]] = {}  # a host's addresses, the next one to try first
        self._not_before: dict[str, float] = {}  # when a host's name may be looked up again

    def fileno(self) -> int:
        """For a selector: readable when `poll` has something to do."""
        return self._selector.fileno()

    def send(self, to: str, at: Endpoint | None, payload: bytes) -> None:
        """To that agent; lost if it is not there."""
        links = self._links.get(to)
        if links:
            links[0].send(payload)
        elif at is not None and at.port:
            self._wait_for(at, to, payload)

    def call(self, at: Endpoint, payload: bytes) -> None:
        """To whoever answers there."""
        links = self._links.get(self._who.get(at, ""))
        if links:
            links[0].send(payload)
        else:
            self._wait_for(at, None, payload)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Do what there is to do, after waiting for it for so long."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        now = time.monotonic()
        if self.wake_at is not None and now >= self.wake_at:
            self._drop_slow_ones(now)

    def close(self, patience_s: float) -> None:
        """Say what is still to be said, and end all connections."""
        self._selector.unregister(self._listener)
        self._listener.close()
        deadline = time.monotonic() + patience_s
        for call in self._calls.values():
            call.link.close()
        for link in [*self._keys, *self._strangers]:
            if link.is_open:
                link.finish(deadline)
            else:
                link.close()
        self._selector.close()

    # Making connections.

    def _accept(self) -> None:
        while True:  # thousands may call at once
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            try:
                link = Called(sock, self._selector, self, self._token)
            except OSError:  # gone already
                sock.close()
                continue
            self._strangers[link] = time.monotonic()
            self._set_alarm()

    def _wait_for(self, at: Endpoint, to: str | None, payload: bytes) -> None:
        call = self._calls.get(at)
        if call is None:
            try:
                address = self._address_of(at.host)
                link = Caller((address, at.port), self._selector, self, self._token)
            except (OSError, HostError) as error:
                if to is None:
                    self._receiver.unreachable(at, str(error))
                return
            call = self._calls[at] = _Call(link)
            self._set_alarm()
        call.waiting = [*call.waiting[1 - _MAX_WAITING :], (to, payload)]

    def _address_of(self, host: str) -> str:
        if host not in self._found:
            began = time.monotonic()
            if began < self._not_before.get(host, began):
                raise HostError(f"nobody knows the name {host!r}")
            try:
                self._found[host] = addresses_of(host)
            except HostError:
                # A slow name service must not keep us from our beats.
                took_s = time.monotonic() - began
                self._not_before[host] = began + took_s * _LOOKUP_REST
                raise
        return self._found[host][0]

    def _drop_slow_ones(self, now: float) -> None:
        for call in [each for each in self._calls.values() if now >= each.began + HANDSHAKE_S]:
            call.link.close()
            self.closed(call.link, f"it did not answer for {HANDSHAKE_S:g} s")
        for link, since in list(self._strangers.items()):
            if now >= since + HANDSHAKE_S:
                link.close()
                del self._strangers[link]
        self._set_alarm()

    def _set_alarm(self) -> None:
        since = [call.began for call in self._calls.values()]
        if self._strangers:
            since.append(next(iter(self._strangers.values())))  # the oldest comes first
        self.wake_at = min(since) + HANDSHAKE_S if since else None

    # Ear.

    def opened(self, link: Link) -> None:
        """See Ear."""
        self._keys[link] = ""
        link.send(self._key.encode())

    def received(self, link: Link, payload: bytes) -> None:
        """See Ear."""
        key = self._keys[link]
        if key:
            self._receiver.heard(key, payload)
            return
        try:
            key = payload.decode("ascii")
        except UnicodeDecodeError:
            key = ""
        if not key.isalnum() or len(key) > _MAX_KEY:
            self._forget(link)
            link.close()
            return
        self._keys[link] = key
        self._links.setdefault(key, []).append(link)
        self._strangers.pop(link, None)
        for at, call in list(self._calls.items()):
            if call.link is link:
                del self._calls[at]
                self._who[at] = key
                self._deliver(link, key, call)
        self._set_alarm()

    def _deliver(self, link: Link, key: str, call: _Call) -> None:
        """Say what waited for the connection to the one who answered, if it was meant."""
        missed = []
        for to, payload in call.waiting:
            if to is None or to == key:
                link.send(payload)
            elif to not in missed:
                missed.append(to)
        for to in missed:
            if not self._links.get(to):
                self._receiver.gone(to, "another agent answers in its place")

    def closed(self, link: Link, why: str) -> None:
        """See Ear."""
        key = self._keys.get(link, "")
        self._forget(link)
        for at, call in list(self._calls.items()):
            if call.link is link:
                del self._calls[at]
                found = self._found.get(at.host, [])
                found.append(found.pop(0)) if found else None
                if any(to is None for to, _ in call.waiting):
                    self._receiver.unreachable(at, why)
        self._set_alarm()
        if key and link.was_ended and not self._links.get(key):
            self._receiver.gone(key, why)

    def _forget(self, link: Link) -> None:
        key = self._keys.pop(link, "")
        self._strangers.pop(link, None)
        if key:
            self._links[key].remove(link)
            if not self._links[key]:
                del self._links[key]
                for at in [at for at, who in self._who.items() if who == key]:
                    del self._who[at]
