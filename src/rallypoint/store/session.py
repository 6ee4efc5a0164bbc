"""What a client does with a connection: a request and its reply at a time, or a watch.

Errors name operation and key. An interrupted exchange closes the connection: its late reply could
be mistaken for that to the next request. A signal handler that runs in the middle of one cannot use
the connection, and calls that another thread waits in may wait for the handler's: see `is_busy`.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rallypoint.base.errors import StoreConnectionError, StoreError, StoreFencedError
from rallypoint.base.record import Record
from rallypoint.store import wire
from rallypoint.store.connection import Connection
from rallypoint.store.store import first_of, wait_timed_out
from rallypoint.store.wire import ErrorCode, EventKind, Status, pack_key

T = TypeVar("T")
E = TypeVar("E", bound=StoreError)

_CANCEL_S = 10.0  # an answer to CANCEL_WAIT may take that long, or as long as any other


class Session:
    """The exchanges of one client. `timeout_s` bounds each of them."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ours = connection.ours
        self._endpoint = connection.endpoint
        self._connection: Connection | None = connection
        # A handler may run when the lock is taken, but the exchange has not begun.
        self._lock = threading.RLock()
        self._thread = 0  # whose exchange is under way; 0: none is
        self._is_waiting = False

    @property
    def is_busy(self) -> bool:
        """Whether an exchange that begins now, in this thread, might never get its turn."""
        return self._is_waiting or self._thread == threading.get_ident()

    def interrupt(self) -> None:
        """End an exchange of another thread with an error, and the connection with it."""
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def exchange(
        self, operation: str, key: str | None, request: bytes, read: Callable[[Connection], T]
    ) -> T:
        """Send `request` and return what `read` makes of the reply."""

        def perform(connection: Connection) -> T:
            connection.send(request)
            return self._read_reply(connection, operation, key, read)

        return self._begin(operation, key, perform, self.timeout_s)

    def exchange_number(
        self, operation: str, key: str | None, request: bytes, layout: struct.Struct
    ) -> int:
        """As `exchange`, for a short request and a reply that is one number: the fast path."""
        with self._lock:
            connection = self._connection or self._usable(operation, key)
            try:
                self._thread = threading.get_ident()
                reply = connection.exchange(request, self.ours + layout.size, self.timeout_s)
                if self.ours and reply[0]:
                    # Every other reply is longer than the longest number.
                    connection.put_back(reply[1:])
                    self._check_status(connection, reply[0], operation, key)
                return layout.unpack_from(reply, self.ours)[0]  # type: ignore[no-any-return]
            except BaseException as error:
                self._raise_if_lost(error, operation, key, self.timeout_s)
                raise
            finally:
                self._thread = 0

    def post(self, operation: str, key: str | None, request: bytes) -> None:
        """Send `request`, which has no reply."""
        self._begin(operation, key, lambda connection: connection.send(request), self.timeout_s)

    def wait(
        self,
        operation: str,
        keys: Sequence[str],
        request: bytes,
        read: Callable[[Connection], T],
        timeout_s: float,
    ) -> T:
        """As `exchange`, for a reply that the server owes only once something has happened."""
        key = first_of(keys)
        cancel_s = max(_CANCEL_S, self.timeout_s)

        def perform(connection: Connection) -> T:
            self._is_waiting = True
            connection.send(request)
            try:
                connection.await_byte()
            except TimeoutError:
                connection.start(cancel_s)
                connection.send(b"\x0c")
                if self._is_canceled(connection):
                    raise wait_timed_out(
                        operation,
                        keys,
                        timeout_s,
                        endpoint=self._endpoint,
                        at=f" at {self._endpoint}",
                    ) from None
                try:  # its result was on its way already
                    return self._read_reply(connection, operation, key, read)
                finally:
                    connection.receive_u8()
            return self._read_reply(connection, operation, key, read)

        return self._begin(operation, key, perform, timeout_s, cancel_s)

    def _is_canceled(self, connection: Connection) -> bool:
        """Whether the answer to CANCEL_WAIT comes first; read it then."""
        canceled = Status.CANCELED if connection.ours else wire.WAIT_CANCELED
        if connection.peek() != canceled:
            return False
        connection.receive_u8()
        return True

    def _begin(
        self,
        operation: str,
        key: str | None,
        perform: Callable[[Connection], T],
        timeout_s: float,
        cancel_s: float = 0.0,
    ) -> T:
        """Carry out an exchange; another `cancel_s` may pass until it fails."""
        with self._lock:
            connection = self._usable(operation, key)
            try:
                self._thread = threading.get_ident()
                connection.start(timeout_s)
                return perform(connection)
            except BaseException as error:
                self._raise_if_lost(error, operation, key, timeout_s + cancel_s)
                raise
            finally:
                self._thread, self._is_waiting = 0, False

    def _read_reply(
        self,
        connection: Connection,
        operation: str,
        key: str | None,
        read: Callable[[Connection], T],
    ) -> T:
        if connection.ours:
            self._check_status(connection, connection.receive_u8(), operation, key)
        return read(connection)

    def _check_status(
        self, connection: Connection, status: int, operation: str, key: str | None
    ) -> None:
        if status == Status.REPLY:
            return
        if status != Status.ERROR:
            raise ConnectionError(f"the server sent status {status} where a reply was expected")
        code, text = connection.receive_u8(), connection.receive_blob().decode(errors="replace")
        if code == ErrorCode.FENCED:
            text = f"was refused: {text}; join the new round first"
            raise self._error(StoreFencedError, operation, key, text)
        raise self._error(StoreError, operation, key, f"was refused: {text}")

    def _usable(self, operation: str, key: str | None) -> Connection:
        if self._connection is None:
            raise self._error(
                StoreConnectionError, operation, key, "is not possible: the connection was closed "
                "or lost earlier; open the store again"
            )  # fmt: skip
        return self._connection

    def _raise_if_lost(
        self, error: BaseException, operation: str, key: str | None, timeout_s: float
    ) -> None:
        """Drop the connection where an exchange broke off in the middle."""
        if isinstance(error, StoreError):
            return
        self.close()
        if isinstance(error, OSError):
            late = isinstance(error, TimeoutError)
            what = f"no answer within {timeout_s:g} s" if late else error.strerror or str(error)
            text = f"failed: {what}; check that the server is still running"
            raise self._error(StoreConnectionError, operation, key, text) from error

    def _error(self, kind: type[E], operation: str, key: str | None, text: str) -> E:
        name = "" if key is None else f" of {key!r}"
        return kind(
            f"{operation}{name} at the store {self._endpoint} {text}",
            endpoint=self._endpoint,
            operation=operation,
            key=key,
        )


class KeyEvent(Record):
    """A key was set, or deleted: then `value` is None."""

    key: str
    value: bytes | None


class Watch:
    """The events of all keys with a prefix, which our server pushes. Use from one thread at a time.

    A watch first reports every existing key, so that no change is missed before it begins. `fileno`
    can be registered with any selector.
    """

    def __init__(self, connection: Connection, prefix: str) -> None:
        self.prefix = prefix
        self._connection = connection
        self._pending = b""
        connection.send(b"\x43" + pack_key(prefix))

    def fileno(self) -> int:
        """Return the descriptor, readable when there is news; then call `events(0)`."""
        return self._connection.fileno()

    def events(self, timeout_s: float | None = None) -> list[KeyEvent]:
        """Return what has happened, waiting for the first event up to `timeout_s` or forever.

        Returns an empty list when nothing happened in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self._parse()
            if found:
                return found
            left_s = None if deadline is None else deadline - time.monotonic()
            try:
                more = self._connection.receive_available(left_s)
            except OSError as error:
                why = f"{error.strerror or error}; check that the server is still running"
                raise self._ended(StoreConnectionError, why) from error
            if not more:
                return []
            self._pending += more

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._connection.close()

    def _parse(self) -> list[KeyEvent]:
        events: list[KeyEvent] = []
        data, start = self._pending, 0
        try:
            while start < len(data):
                if data[start] == Status.REPLY:
                    # The end of the initial keys; not needed, but it takes 2 bytes.
                    if len(data) < start + 2:
                        break
                    start += 2
                    continue
                parsed = _parse_event(data, start)
                if parsed is None:
                    break
                kind, raw_key, value, start = parsed
                if kind == EventKind.FENCED:
                    text = value.decode(errors="replace")
                    raise self._ended(StoreFencedError, f"{text}; join the new round")
                key = raw_key[1:].decode(errors="surrogateescape")
                events.append(KeyEvent(key, value if kind == EventKind.SET else None))
        finally:
            self._pending = data[start:]
        return events

    def _ended(self, kind: type[E], why: str) -> E:
        endpoint = self._connection.endpoint
        return kind(
            f"the watch of {self.prefix!r} at the store {endpoint} ended: {why}",
            endpoint=endpoint,
            operation="watch",
            key=self.prefix,
        )


def _parse_event(data: bytes, start: int) -> tuple[int, bytes, bytes, int] | None:
    """Return kind, key, value and where the next message starts, or None if bytes are missing."""
    parts: list[bytes] = []
    end = start + 2
    for _ in range(2):
        if len(data) < end + 8:
            return None
        length = int.from_bytes(data[end : end + 8], "little")
        end += 8
        if len(data) < end + length:
            return None
        parts.append(data[end : end + length])
        end += length
    return data[start + 1], parts[0], parts[1], end
