"""One request and its reply at a time over one connection, with errors that name operation and key.

An interrupted exchange closes the connection: its late reply could be mistaken for that to the next
request. A signal handler that runs in the middle of one cannot use the connection, and calls that
another thread waits in may wait for the handler's: see `is_busy`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from rallypoint.base.errors import (
    StoreConnectionError,
    StoreError,
    StoreFencedError,
    StoreTimeoutError,
)
from rallypoint.store import wire
from rallypoint.store.connection import Connection
from rallypoint.store.wire import ErrorCode, Status

T = TypeVar("T")

_CANCEL_S = 10.0  # an answer to CANCEL_WAIT may take that long, or as long as any other


class _WaitCanceledError(Exception):
    """The wait ended because its time was up; the connection is fine."""


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
        with self._lock:
            connection = self._usable(operation, key)
            try:
                self._thread = threading.get_ident()
                connection.start(self.timeout_s)
                connection.send(request)
                if connection.ours:
                    self._check_status(connection, connection.receive_u8(), operation, key)
                return read(connection)
            except OSError as error:
                raise self._lost(operation, key, error, self.timeout_s) from error
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                self._thread = 0

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
            except OSError as error:
                raise self._lost(operation, key, error, self.timeout_s) from error
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                self._thread = 0

    def post(self, operation: str, key: str | None, request: bytes) -> None:
        """Send `request`, which has no reply."""
        with self._lock:
            connection = self._usable(operation, key)
            try:
                self._thread = threading.get_ident()
                connection.start(self.timeout_s)
                connection.send(request)
            except OSError as error:
                raise self._lost(operation, key, error, self.timeout_s) from error
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                self._thread = 0

    def wait(
        self,
        operation: str,
        keys: Sequence[str],
        request: bytes,
        read: Callable[[Connection], T],
        timeout_s: float,
    ) -> T:
        """As `exchange`, for a reply that the server owes only once something has happened."""
        key = _first(keys)
        with self._lock:
            connection = self._usable(operation, key)
            try:
                self._thread, self._is_waiting = threading.get_ident(), True
                connection.start(timeout_s)
                connection.send(request)
                try:
                    connection.await_byte()
                except TimeoutError:
                    return self._cancel(connection, operation, key, read)
                if connection.ours:
                    self._check_status(connection, connection.receive_u8(), operation, key)
                return read(connection)
            except _WaitCanceledError:
                raise self._timed_out(operation, keys, timeout_s) from None
            except OSError as error:
                waited_s = timeout_s + self._cancel_s
                raise self._lost(operation, key, error, waited_s) from error
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                self._thread, self._is_waiting = 0, False

    @property
    def _cancel_s(self) -> float:
        return max(_CANCEL_S, self.timeout_s)

    def _cancel(
        self,
        connection: Connection,
        operation: str,
        key: str | None,
        read: Callable[[Connection], T],
    ) -> T:
        """End a wait whose time is up, or return its result if that was on its way already."""
        connection.start(self._cancel_s)
        connection.send(b"\x0c")
        if not connection.ours:
            if connection.peek() == wire.WAIT_CANCELED:
                connection.receive_u8()
                raise _WaitCanceledError
            result = read(connection)
            connection.receive_u8()
            return result
        status = connection.receive_u8()
        if status == Status.CANCELED:
            raise _WaitCanceledError
        try:
            self._check_status(connection, status, operation, key)
            return read(connection)
        finally:
            connection.receive_u8()

    def _check_status(
        self, connection: Connection, status: int, operation: str, key: str | None
    ) -> None:
        if status == Status.REPLY:
            return
        if status != Status.ERROR:
            raise ConnectionError(f"the server sent status {status} where a reply was expected")
        code, text = connection.receive_u8(), connection.receive_blob().decode(errors="replace")
        if code == ErrorCode.FENCED:
            raise StoreFencedError(
                f"{self._where(operation, key)} was refused: {text}; join the new round first",
                endpoint=self._endpoint,
                operation=operation,
                key=key,
            )
        raise StoreError(
            f"{self._where(operation, key)} was refused: {text}",
            endpoint=self._endpoint,
            operation=operation,
            key=key,
        )

    def _usable(self, operation: str, key: str | None) -> Connection:
        if self._connection is None:
            raise StoreConnectionError(
                f"{self._where(operation, key)} is not possible: the connection was closed or "
                "lost earlier; open the store again",
                endpoint=self._endpoint,
                operation=operation,
                key=key,
            )
        return self._connection

    def _give_up(self, error: BaseException) -> None:
        """Drop the connection where an exchange broke off in the middle."""
        if not isinstance(error, StoreError) and self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lost(
        self, operation: str, key: str | None, error: OSError, timeout_s: float
    ) -> StoreConnectionError:
        self._give_up(error)
        late = isinstance(error, TimeoutError)
        what = f"no answer within {timeout_s:g} s" if late else error.strerror or str(error)
        return StoreConnectionError(
            f"{self._where(operation, key)} failed: {what}; check that the server is still running",
            endpoint=self._endpoint,
            operation=operation,
            key=key,
        )

    def _timed_out(
        self, operation: str, keys: Sequence[str], timeout_s: float
    ) -> StoreTimeoutError:
        names = ", ".join(map(repr, keys[:8])) + (", ..." if len(keys) > 8 else "")
        return StoreTimeoutError(
            f"{operation} of {names} at {self._endpoint} timed out after {timeout_s:g} s; "
            "check the process that should have set it",
            endpoint=self._endpoint,
            operation=operation,
            key=_first(keys),
        )

    def _where(self, operation: str, key: str | None) -> str:
        name = "" if key is None else f" of {key!r}"
        return f"{operation}{name} at the store {self._endpoint}"


def _first(keys: Sequence[str]) -> str | None:
    return keys[0] if keys else None
