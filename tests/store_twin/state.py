"""The behaviour of the store's server for each request: the reference for the native server.

Messages and `now` are inputs, actions with their reasons are outputs; connections are plain ids.
The semantics are those of torch 2.13's libuv server where that is correct. Where it is not (a queue
push that leaves a waiter registered, a wait on a non-empty queue that never ends), this one is, and
a waiter is released only by keys that exist. A thin driver owns the sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tests.store_twin.keyspace import Entry, Keyspace
from tests.store_twin.messages import Reply, Request

from rallypoint.store import wire
from rallypoint.store.local_store import wrapped
from rallypoint.store.wire import ErrorCode, EventKind, Opcode, Status

HANDSHAKE_S = 30.0  # a client is closed if it has not sent VALIDATE by then


@dataclass(frozen=True, slots=True)
class Send:
    """Send `reply` to `connection`, encoded as encode_reply does for it."""

    connection: int
    reply: Reply
    tagged: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Close `connection`; `reason` goes to the log."""

    connection: int
    reason: str


Action = Send | Close


class _ViolationError(Exception):
    """The request ends its connection."""


class _RefusedError(Exception):
    """The request is refused: by an ERROR reply if the client has probed, otherwise by closing the
    connection.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class _Wait:
    """What a connection waits for. `asked` is kept for the answer; `missing` shrinks until it is
    empty.
    """

    opcode: Opcode
    asked: tuple[bytes, ...]
    missing: set[bytes]


@dataclass(slots=True)
class _Connection:
    since: float
    space: Keyspace
    validated: bool = False
    tagged: bool = False
    wait: _Wait | None = None


class State:
    """Keys, queues, waiters and rounds of one server."""

    def __init__(self) -> None:
        self._default = Keyspace()
        self._rounds: dict[bytes, Keyspace] = {}
        self._connections: dict[int, _Connection] = {}
        self._actions: list[Action] = []

    def connect(self, connection: int, now: float) -> None:
        """Register a new connection."""
        self._connections[connection] = _Connection(now, self._default)
        self._default.members.add(connection)

    def handle(self, connection: int, request: Request) -> list[Action]:
        """Do what `request` asks; a Close among the actions means the connection is forgotten."""
        client = self._connections[connection]
        try:
            self._admit(client, request)
            if handler := _HANDLERS[request.opcode]:
                handler(self, connection, client, request)
        except _ViolationError as violation:
            self._forget(connection)
            self._actions.append(Close(connection, str(violation)))
        except _RefusedError as refused:
            if client.tagged and request.opcode in _UNREPLIED:
                pass  # the next request with a reply reports it
            elif client.tagged:
                body = wire.u8(refused.code) + wire.blob(str(refused).encode())
                self._send(connection, body, Status.ERROR)
            else:
                self._forget(connection)
                self._actions.append(Close(connection, str(refused)))
        return self._drain()

    def disconnect(self, connection: int) -> list[Action]:
        """Forget a connection that its peer closed, with its wait, its watches and its ephemeral
        keys.
        """
        self._forget(connection)
        return self._drain()

    def expire(self, now: float) -> list[Action]:
        """Close the connections that have not introduced themselves in time."""
        late = [
            connection
            for connection, client in self._connections.items()
            if not client.validated and now - client.since >= HANDSHAKE_S
        ]
        for connection in late:
            self._forget(connection)
            self._actions.append(Close(connection, "no VALIDATE in time"))
        return self._drain()

    # Connections.

    def _admit(self, client: _Connection, request: Request) -> None:
        if not client.validated:
            if request.opcode is not Opcode.VALIDATE:
                raise _ViolationError("the first request is not VALIDATE")
            if request.number != wire.MAGIC:
                raise _ViolationError("VALIDATE carries a wrong number")
            client.validated = True
        elif request.opcode is Opcode.VALIDATE:
            raise _ViolationError("a second VALIDATE")
        if request.opcode >= Opcode.WAIT_GET and not client.tagged:
            raise _ViolationError(f"opcode {request.opcode.value} before the probe")
        if client.space.fenced_by is not None and request.opcode not in _UNFENCED:
            raise _RefusedError(ErrorCode.FENCED, client.space.fenced_text())

    def _forget(self, connection: int) -> None:
        client = self._connections.pop(connection)
        self._stop_waiting(connection, client)
        self._leave(connection, client.space)

    def _leave(self, connection: int, space: Keyspace) -> None:
        space.members.discard(connection)
        space.watchers = [watcher for watcher in space.watchers if watcher[0] != connection]
        owned = [key for key, entry in space.entries.items() if entry.owner == connection]
        for key in sorted(owned):
            self._delete(space, key)

    def _stop_waiting(self, connection: int, client: _Connection) -> None:
        if client.wait is None:
            return
        registry = client.space.line(client.wait.opcode)
        for key in client.wait.missing:
            registry[key].remove(connection)
            if not registry[key]:
                del registry[key]
        client.wait = None

    # Replies.

    def _send(self, connection: int, body: bytes, status: Status = Status.REPLY) -> None:
        tagged = self._connections[connection].tagged
        self._actions.append(Send(connection, Reply(status, body), tagged))

    def _drain(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # Requests.

    def _set(self, connection: int, client: _Connection, request: Request) -> None:
        owner = connection if request.opcode is Opcode.SET_EPHEMERAL else None
        for key, value in zip(request.keys, request.values, strict=True):
            self._put(client.space, key, value, owner)

    def _add(self, connection: int, client: _Connection, request: Request) -> None:
        total = wrapped(self._number(client.space, request.key) + request.number)
        self._put(client.space, request.key, b"%d" % total)
        self._send(connection, wire.i64(total))

    def _get(self, connection: int, client: _Connection, request: Request) -> None:
        self._send(connection, client.space.values(request.keys))

    def _check(self, connection: int, client: _Connection, request: Request) -> None:
        ready = all(client.space.has(key) for key in request.keys)
        self._send(connection, wire.u8(wire.READY if ready else wire.NOT_READY))

    def _num_keys(self, connection: int, client: _Connection, request: Request) -> None:
        self._send(connection, wire.i64(len(client.space.entries)))

    def _list_keys(self, connection: int, client: _Connection, request: Request) -> None:
        keys = client.space.entries
        self._send(connection, wire.i64(len(keys)) + b"".join(map(wire.blob, keys)))

    def _delete_key(self, connection: int, client: _Connection, request: Request) -> None:
        there = request.key in client.space.entries
        if there:
            self._delete(client.space, request.key)
        self._send(connection, wire.i64(there))

    def _cancel_wait(self, connection: int, client: _Connection, request: Request) -> None:
        self._stop_waiting(connection, client)
        if client.tagged:
            self._send(connection, b"", Status.CANCELED)
        else:
            self._send(connection, wire.u8(wire.WAIT_CANCELED))

    def _ping(self, connection: int, client: _Connection, request: Request) -> None:
        nonce = request.number
        if nonce == wire.PROBE and not client.tagged:
            self._send(connection, wire.u32(wire.PROBE_ANSWER))
            client.tagged = True
        else:
            self._send(connection, wire.u32(nonce))

    def _append(self, connection: int, client: _Connection, request: Request) -> None:
        space, key = client.space, request.key
        whole = space.value(key) + request.value
        if len(whole) > wire.MAX_APPENDED:
            raise _ViolationError(f"value appended to beyond {wire.MAX_APPENDED} bytes")
        self._put(space, key, whole)

    def _compare_set(self, connection: int, client: _Connection, request: Request) -> None:
        space = client.space
        expected, new = request.values
        entry = space.entries.get(request.key)
        if entry is None and expected:
            self._send(connection, wire.blob(expected))  # as in torch: the caller cannot tell
        elif entry is None or entry.value == expected:
            self._put(space, request.key, new)
            self._send(connection, wire.blob(new))
        else:
            self._send(connection, wire.blob(entry.value))

    def _barrier(self, connection: int, client: _Connection, request: Request) -> None:
        space, key = client.space, request.key
        self._check_idle(client)
        count = wrapped(self._number(space, key) + 1)
        entry = space.entries.get(key)
        if entry is None:
            space.entries[key] = Entry(b"%d" % count)
        else:
            entry.value, entry.owner = b"%d" % count, None
        self._tell_watchers(space, EventKind.SET, key, b"%d" % count)
        if count >= request.number:
            self._release(space, key)
            self._send(connection, wire.u8(wire.STOP_WAITING))
        else:
            self._register(connection, client, _Wait(Opcode.BARRIER, (key,), {key}))

    # Keys.

    def _number(self, space: Keyspace, key: bytes) -> int:
        number = space.number(key)
        if number is None:
            raise _RefusedError(ErrorCode.NOT_A_NUMBER, "the value is not a 64-bit decimal number")
        return number

    def _put(self, space: Keyspace, key: bytes, value: bytes, owner: int | None = None) -> None:
        entry = space.entries.get(key)
        if entry is None:
            space.entries[key] = Entry(value, owner)
        else:
            entry.value, entry.owner = value, owner
        self._tell_watchers(space, EventKind.SET, key, value)
        self._release(space, key)

    def _delete(self, space: Keyspace, key: bytes) -> None:
        del space.entries[key]
        self._tell_watchers(space, EventKind.DELETED, key, b"")

    def _tell_watchers(self, space: Keyspace, kind: EventKind, key: bytes, value: bytes) -> None:
        for connection, prefix in space.watchers:
            if key.startswith(prefix):
                self._send(connection, _event(kind, key, value), Status.EVENT)

    # Waiting.

    def _check_idle(self, client: _Connection) -> None:
        if client.wait is not None:
            raise _ViolationError("a second wait while one is pending")

    def _wait(self, connection: int, client: _Connection, request: Request) -> None:
        self._check_idle(client)
        missing = {key for key in request.keys if not client.space.has(key)}
        wait = _Wait(request.opcode, request.keys, missing)
        if missing:
            self._register(connection, client, wait)
        else:
            self._answer_wait(connection, client.space, wait)

    def _register(self, connection: int, client: _Connection, wait: _Wait) -> None:
        client.wait = wait
        registry = client.space.line(wait.opcode)
        for key in dict.fromkeys(wait.asked):
            if key in wait.missing:
                registry.setdefault(key, []).append(connection)

    def _release(self, space: Keyspace, key: bytes) -> None:
        for connection in space.waiters.pop(key, ()):
            self._found(connection, key)

    def _found(self, connection: int, key: bytes) -> None:
        client = self._connections[connection]
        assert client.wait is not None
        client.wait.missing.discard(key)
        if client.wait.missing:
            return
        wait, client.wait = client.wait, None
        if wait.opcode is Opcode.WAIT_GET:
            # A key may have been deleted while others were awaited; its value is still owed.
            wait.missing = {key for key in wait.asked if not client.space.has(key)}
            if wait.missing:
                self._register(connection, client, wait)
                return
        self._answer_wait(connection, client.space, wait)

    def _answer_wait(self, connection: int, space: Keyspace, wait: _Wait) -> None:
        if wait.opcode is Opcode.WAIT_GET:
            self._send(connection, space.values(wait.asked))
        else:
            self._send(connection, wire.u8(wire.STOP_WAITING))

    # Queues. A non-empty queue has no waiting takers, and an empty one does not exist.

    def _push(self, connection: int, client: _Connection, request: Request) -> None:
        space, key = client.space, request.key
        if takers := space.takers.get(key):
            taker = takers[0]
            self._stop_waiting(taker, self._connections[taker])
            self._send(taker, wire.blob(request.value))
            return
        space.queues.setdefault(key, deque()).append(request.value)
        if waiters := space.waiters.get(key):
            waiter = waiters.pop(0)
            if not waiters:
                del space.waiters[key]
            self._found(waiter, key)

    def _pop(self, connection: int, client: _Connection, request: Request) -> None:
        length = client.space.length(request.key)
        value = wire.blob(client.space.pop(request.key)) if length else b""
        self._send(connection, wire.i64(length) + value)

    def _queue_len(self, connection: int, client: _Connection, request: Request) -> None:
        self._send(connection, wire.i64(client.space.length(request.key)))

    def _take(self, connection: int, client: _Connection, request: Request) -> None:
        self._check_idle(client)
        key = request.key
        if key in client.space.queues:
            self._send(connection, wire.blob(client.space.pop(key)))
        else:
            self._register(connection, client, _Wait(request.opcode, (key,), {key}))

    # Ours: watches and rounds.

    def _watch(self, connection: int, client: _Connection, request: Request) -> None:
        space, prefix = client.space, request.key
        space.watchers.append((connection, prefix))
        for key, entry in space.entries.items():
            if key.startswith(prefix):
                self._send(connection, _event(EventKind.SET, key, entry.value), Status.EVENT)
        self._send(connection, wire.u8(0))

    def _enter(self, connection: int, client: _Connection, request: Request) -> None:
        self._check_idle(client)
        name, number = request.key, request.number
        current = self._rounds.get(name)
        if current is not None and number < current.round:
            stale = Keyspace(name, number, fenced_by=current.round)
            raise _RefusedError(ErrorCode.FENCED, stale.fenced_text())
        if current is None or number > current.round:
            self._rounds[name] = Keyspace(name, number)
            if current is not None:
                self._fence(current, number)
            current = self._rounds[name]
        self._leave(connection, client.space)
        client.space = current
        current.members.add(connection)
        self._send(connection, wire.i64(number))

    def _fence(self, space: Keyspace, by: int) -> None:
        """End a round: its keys are deleted at once, and those that wait or watch in it are told
        why.
        """
        watching = {watcher for watcher, _ in space.watchers}
        waiting = {member for member in space.members if self._connections[member].wait}
        space.fence(by)
        text = space.fenced_text().encode()
        for connection in sorted(watching):
            self._send(connection, _event(EventKind.FENCED, b"", text), Status.EVENT)
        for connection in sorted(waiting):
            self._connections[connection].wait = None
            self._send(connection, wire.u8(ErrorCode.FENCED) + wire.blob(text), Status.ERROR)


_HANDLERS: dict[Opcode, Callable[[State, int, _Connection, Request], None] | None] = {
    Opcode.VALIDATE: None,
    Opcode.PING: State._ping,
    Opcode.SET: State._set,
    Opcode.SET_EPHEMERAL: State._set,
    Opcode.MULTI_SET: State._set,
    Opcode.APPEND: State._append,
    Opcode.ADD: State._add,
    Opcode.COMPARE_SET: State._compare_set,
    Opcode.GET: State._get,
    Opcode.MULTI_GET: State._get,
    Opcode.CHECK: State._check,
    Opcode.NUM_KEYS: State._num_keys,
    Opcode.LIST_KEYS: State._list_keys,
    Opcode.DELETE_KEY: State._delete_key,
    Opcode.WAIT: State._wait,
    Opcode.WAIT_GET: State._wait,
    Opcode.CANCEL_WAIT: State._cancel_wait,
    Opcode.BARRIER: State._barrier,
    Opcode.QUEUE_PUSH: State._push,
    Opcode.QUEUE_POP: State._pop,
    Opcode.QUEUE_LEN: State._queue_len,
    Opcode.QUEUE_TAKE: State._take,
    Opcode.WATCH: State._watch,
    Opcode.ENTER: State._enter,
}

_UNREPLIED = frozenset(
    {
        Opcode.SET,
        Opcode.SET_EPHEMERAL,
        Opcode.MULTI_SET,
        Opcode.APPEND,
        Opcode.QUEUE_PUSH,
    }
)

_UNFENCED = frozenset({Opcode.PING, Opcode.CANCEL_WAIT, Opcode.ENTER})


def _event(kind: EventKind, key: bytes, value: bytes) -> bytes:
    return wire.u8(kind) + wire.blob(key) + wire.blob(value)
