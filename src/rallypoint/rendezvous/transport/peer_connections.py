"""Connections with agents that are known by their keys: made when there is something to say.

    send(key, at, bytes): over a connection with that agent, else call it where it listens
    call(at, bytes): to any agent that answers there

The first frame in each direction is the sender's key. Both sides may call at once; then both
connections stay, and the newest is used. When it is stalled (its flow was dropped on the way), the
agent is called where it listens: the new connection's first frame also names the old ones, which
both sides then drop. An agent counts as gone when its last connection is closed as the kernel does
for a process that ends, or when another agent answers at its address. It does not count as gone
when a connection could not be made, or was ended by a live agent. Whether one that broke on the way
is an end is the caller's choice (`lost_s`). It has its own selector, and is itself selectable.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from abc import ABC, abstractmethod

from rallypoint.base.errors import HostError
from rallypoint.base.ready import call_ready, earliest
from rallypoint.cluster.names import Names
from rallypoint.rendezvous.job.round import Endpoint
from rallypoint.rendezvous.transport.link import (
    SILENCE_S,
    WITHOUT_TOKEN,
    Called,
    Caller,
    ConnectionListener,
    Link,
)

HANDSHAKE_S = 5.0
_MAX_KEY = 64
_MAX_WAITING = 32  # messages for a connection being made; all are sent again anyway
_MAX_STRANGERS = 512  # connections not yet proved; more wait in the kernel's queue
_MAX_ACCEPTS = 64  # in a row, so that other events are handled, too
_MAX_CALLS_AGAIN = 64  # calls in progress; behind a cut, thousands of unreachable peers may stall
_FULL_S = 0.5  # without descriptors, the time until the next try


class Receiver(ABC):
    """Receives the events of the connections."""

    @abstractmethod
    def heard(self, key: str, payload: bytes) -> None:
        """The agent with this key sent something."""

    @abstractmethod
    def gone(self, key: str, why: str) -> None:
        """The agent with this key has ended."""

    @abstractmethod
    def failed(self, address: str, what: str) -> None:
        """A message between us and the agent there was dropped; both are alive."""

    @abstractmethod
    def refused(self, address: str) -> None:
        """An agent there called, and does not have the job's token."""

    @abstractmethod
    def unreachable(self, at: Endpoint, why: str) -> None:
        """No agent answers there, or it refuses us."""


class _Call:
    """A connection that is being made, and what waits for it."""

    def __init__(self) -> None:
        self.link: Link | None = None  # None: the host's name is being looked up
        self.began = time.monotonic()
        # The receiver; None: any agent that is there.
        self.waiting: list[tuple[str | None, bytes]] = []
        self.replaces: set[Link] = set()  # stalled ones


class PeerConnections(ConnectionListener):
    """All connections of one agent.

    Args:
        key: this agent's own.
        listener: where others call it; owned by this object. None: it only calls.
        stalled_s: replace a connection after this long without an acknowledgement.
        lost_s: a connection breaks after this long without an acknowledgement, and then the other
            agent counts as gone; None: it breaks later, and the agent does not count as gone.

    Attributes:
        wake_at: when to call `poll` even if nothing happens; None: never.
    """

    def __init__(
        self,
        key: str,
        token: bytes,
        listener: socket.socket | None,
        receiver: Receiver,
        *,
        stalled_s: float = 2.0,
        lost_s: float | None = None,
    ) -> None:
        self.wake_at: float | None = None
        self._key = key
        self._token = token
        self._receiver = receiver
        self._stalled_s = stalled_s
        self._is_gone_if_broken = lost_s is not None
        self._silence_s = SILENCE_S if lost_s is None else lost_s
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        # Of all that have proved themselves; empty before the first frame.
        self._keys: dict[Link, str] = {}
        self._links: dict[str, list[Link]] = {}  # by key; the newest is the last
        # Callers that have not sent their key, and since when.
        self._strangers: dict[Link, float] = {}
        self._calls: dict[Endpoint, _Call] = {}
        self._who: dict[Endpoint, str] = {}  # the agent that answered there, while connected
        self._names = Names()
        self._selector.register(self._names, selectors.EVENT_READ, self._names_found)
        self._listens = True
        self._listen_at: float | None = None  # when to listen again after descriptors ran out
        self._is_closing = False

    def fileno(self) -> int:
        """For a selector: readable when `poll` has something to do."""
        return self._selector.fileno()

    def is_connected(self, key: str) -> bool:
        """Whether there is a connection with that agent."""
        return key in self._links

    def address_of(self, key: str) -> str:
        """The address of a connected agent; its key for one that is not."""
        links = self._links.get(key)
        return links[-1].peer if links else key

    def send(self, to: str, at: Endpoint | None, payload: bytes) -> None:
        """Send to that agent; lost if it is not there."""
        links = self._links.get(to)
        if links:
            link = links[-1]
            if link.is_stalled(self._stalled_s) and at is not None and at.port:
                self._call_again(at, to, payload)
            link.send(payload)
        elif at is not None and at.port:
            self._wait_for(at, to, payload)

    def call(self, at: Endpoint, payload: bytes) -> None:
        """Send to whichever agent answers there."""
        who = self._who.get(at)
        if who is not None:
            self.send(who, at, payload)
        else:
            self._wait_for(at, None, payload)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Handle events, after waiting for them for that long."""
        call_ready(self._selector, timeout_s)
        now = time.monotonic()
        if self.wake_at is not None and now >= self.wake_at:
            self._drop_slow_ones(now)
            if self._listen_at is not None and now >= self._listen_at:
                self._listen_at = None
            self._update_listener()

    def close(self, wait_s: float) -> None:
        """Send what is queued, and end all connections, without reporting their ends."""
        self._is_closing = True
        if self._listener is not None:
            self._listener.close()
        self._names.close()
        deadline = time.monotonic() + wait_s
        for key in list(self._selector.get_map().values()):
            link = key.data.__self__  # also for those that are being made, or were dropped
            if isinstance(link, Link):
                if link.is_open:
                    link.finish(deadline)
                else:
                    link.close()
        self._selector.close()

    # Making connections.

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_MAX_ACCEPTS):  # thousands may call at once
            if len(self._strangers) >= _MAX_STRANGERS:
                break
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._listen_at = time.monotonic() + _FULL_S
                    break
                continue  # that one is gone already
            try:
                link = Called(sock, self._selector, self, self._token, self._silence_s)
            except OSError:  # gone already
                sock.close()
                continue
            self._strangers[link] = time.monotonic()
        self._update_listener()

    def _update_listener(self) -> None:
        """Listen only while there is room: many strangers could keep us busy otherwise."""
        wants = self._listen_at is None and len(self._strangers) < _MAX_STRANGERS
        if self._listener is not None and wants != self._listens:
            self._listens = wants
            if wants:
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            else:
                self._selector.unregister(self._listener)
        self._set_alarm()

    def _wait_for(self, at: Endpoint, to: str | None, payload: bytes) -> None:
        if self._is_closing:
            return
        call = self._calls.get(at)
        if call is not None:
            call.waiting = [*call.waiting[1 - _MAX_WAITING :], (to, payload)]
            return
        call = self._calls[at] = _Call()
        call.waiting.append((to, payload))
        self._dial(at, call)

    def _call_again(self, at: Endpoint, to: str, payload: bytes) -> None:
        """Try to replace the stalled connections with that agent; until then nothing changes."""
        if at not in self._calls and len(self._calls) >= _MAX_CALLS_AGAIN:
            return
        self._wait_for(at, to, payload)
        call = self._calls.get(at)
        if call is not None:
            call.replaces.update(self._links[to])

    def _dial(self, at: Endpoint, call: _Call) -> None:
        try:
            address = self._names.address_of(at.host)
            if address is not None:
                endpoint = (address, at.port)
                call.link = Caller(endpoint, self._selector, self, self._token, self._silence_s)
        except (OSError, HostError) as error:
            self._names.failed(at.host)
            self._give_up(at, call, str(error))
        self._set_alarm()

    def _names_found(self) -> None:
        for host in self._names.take():
            for at, call in list(self._calls.items()):
                if call.link is None and at.host == host:
                    self._dial(at, call)

    def _give_up(self, at: Endpoint, call: _Call, why: str) -> None:
        del self._calls[at]
        if any(to is None for to, _ in call.waiting):
            self._receiver.unreachable(at, why)

    def _drop_slow_ones(self, now: float) -> None:
        slow = [item for item in self._calls.items() if now >= item[1].began + HANDSHAKE_S]
        for at, call in slow:
            if call.link is None:
                self._give_up(at, call, f"its name was not resolved within {HANDSHAKE_S:g} s")
            else:
                call.link.drop()
                self.closed(call.link, f"it did not answer for {HANDSHAKE_S:g} s")
        for link, since in list(self._strangers.items()):
            if now < since + HANDSHAKE_S:
                break  # the oldest come first
            self._drop(link)

    def _set_alarm(self) -> None:
        began = [call.began for call in self._calls.values()]
        began += list(self._strangers.values())[:1]  # the oldest come first
        self.wake_at = earliest(*(since + HANDSHAKE_S for since in began), self._listen_at)

    # ConnectionListener.

    def opened(self, link: Link) -> None:
        self._keys[link] = ""
        replaced = [call.replaces for call in self._calls.values() if call.link is link]
        names = [old.name for links in replaced for old in links]
        link.send(",".join([self._key, *names]).encode())

    def received(self, link: Link, payload: bytes) -> None:
        key = self._keys[link]
        if key:
            self._receiver.heard(key, payload)
            return
        try:
            key, *replaced = payload.decode("ascii").split(",")
        except UnicodeDecodeError:
            key, replaced = "", []
        is_taken = any(other.peer != link.peer for other in self._links.get(key, ()))
        if not key.isalnum() or len(key) > _MAX_KEY or is_taken:
            self._drop(link)
            self._update_listener()
            return
        self._keys[link] = key
        olds = [old for old in self._links.get(key, ()) if old.name in replaced]
        self._links.setdefault(key, []).append(link)
        self._strangers.pop(link, None)
        for old in olds:
            self._drop(old)
        for at, call in list(self._calls.items()):
            if call.link is link:
                del self._calls[at]
                self._drop_replaced(call, key)
                self._names.worked(at.host)
                self._who[at] = key
                self._deliver(link, key, call)
        self._update_listener()

    def _drop_replaced(self, call: _Call, key: str) -> None:
        """Also if another agent answers, unless they are no longer stalled."""
        for old in call.replaces:
            whose = self._keys.get(old)
            if whose == key or (whose is not None and old.is_stalled(self._stalled_s)):
                self._drop(old)

    def _deliver(self, link: Link, key: str, call: _Call) -> None:
        """Send what waited for the connection, if this is the intended agent."""
        missed = []
        for to, payload in call.waiting:
            if to is None or to == key:
                link.send(payload)
            elif to not in missed:
                missed.append(to)
        for to in missed:
            if not self._links.get(to):
                self._receiver.gone(to, "another agent answers at its address")

    def closed(self, link: Link, why: str) -> None:
        if self._is_closing:
            return
        key = self._keys.get(link, "")
        if link in self._strangers and why == WITHOUT_TOKEN:
            self._receiver.refused(link.peer)
        self._forget(link)
        for at, call in list(self._calls.items()):
            if call.link is link:
                self._names.failed(at.host)
                self._give_up(at, call, why)
        self._update_listener()
        is_end = link.was_ended or (self._is_gone_if_broken and link.was_broken)
        if key and is_end and not self._links.get(key):
            self._receiver.gone(key, why)

    def failed(self, link: Link, what: str) -> None:
        if not self._is_closing:
            self._receiver.failed(link.peer, what)

    def _drop(self, link: Link) -> None:
        self._forget(link)
        link.drop()

    def _forget(self, link: Link) -> None:
        key = self._keys.pop(link, "")
        self._strangers.pop(link, None)
        if key:
            self._links[key].remove(link)
            if not self._links[key]:
                del self._links[key]
                for at in [at for at, who in self._who.items() if who == key]:
                    del self._who[at]
