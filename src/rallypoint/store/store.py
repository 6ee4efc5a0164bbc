"""The interface of all stores: that of torch.distributed's stores, for str keys.

Values are passed as str or bytes and returned as bytes. Operations that can be derived from simpler
ones are implemented here once; no method is optional.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

from rallypoint.base.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    QueueEmptyError,
    StoreTimeoutError,
)

DEFAULT_TIMEOUT = timedelta(seconds=300)


class Store(ABC):
    """Keys with values, and queues, that several processes share.

    Every operation ends within the timeout. Each may raise StoreConnectionError (the store cannot
    be reached), InvalidTypeError (a key is not a str, or a value neither str nor bytes) and
    StoreFencedError (the round that this client belongs to has ended).
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long an operation waits by default."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations wait by default.

        Raises:
            InvalidTypeError, InvalidArgumentError: it is not a positive timedelta.
        """
        seconds_of(timeout)
        self._timeout = timeout

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key`, replacing the previous value."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the value of `key`, and wait for the key to appear if necessary.

        Raises:
            StoreTimeoutError: the key did not appear within the timeout.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the decimal number under `key` (0 if the key is missing); return the sum.

        Raises:
            StoreError: the value is not a number.
        """

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None:
        """Append `value` to the value of `key`, which is empty if the key is missing."""

    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if `key` holds `expected`, or if it is missing and `expected` is empty.

        Returns:
            The value of `key` afterwards, or `expected` if the key is still missing.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` exist; never waits."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` exist.

        Raises:
            StoreTimeoutError: a key did not appear within `timeout` (default: the store's).
        """

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Delete `key`; return whether it existed."""

    def delete_keys(self, keys: Sequence[str]) -> int:
        """Delete several keys; return how many of them existed."""
        return sum(map(self.delete_key, keys))

    @abstractmethod
    def num_keys(self) -> int:
        """Return the number of keys."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """Return all keys, in no particular order."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all `keys`, and wait for them to appear if necessary.

        Raises:
            StoreTimeoutError: a key did not appear within the timeout.
        """

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values at once."""

    @abstractmethod
    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append `value` to the queue `key`."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of the queue `key`.

        Raises:
            QueueEmptyError: the queue is empty and `block` is false.
            StoreTimeoutError: the queue stayed empty for the timeout, and `block` is true.
        """

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue `key`."""

    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until `world_size` callers have called this with the same `key`, which serves once.

        Raises:
            StoreTimeoutError: some did not call within `timeout` (default: the store's).
        """

    @abstractmethod
    def clone(self) -> Store:
        """Return another handle to the same store, for use by another thread."""

    @abstractmethod
    def close(self) -> None:
        """Close this handle; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EphemeralStore(Store):
    """A store whose server can delete a key when the process that set it ends."""

    @property
    @abstractmethod
    def is_ours(self) -> bool:
        """Whether the server is Rallypoint's: torch's cannot do that."""

    @abstractmethod
    def set_ephemeral(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key` until this connection ends."""


def empty_queue(key: str, endpoint: str) -> QueueEmptyError:
    """Return the error for `queue_pop(block=False)` on an empty queue."""
    return QueueEmptyError(
        f"the queue {key!r} at {endpoint} is empty; pass block=True to wait for a value",
        endpoint=endpoint,
        operation="queue_pop",
        key=key,
    )


def wait_timed_out(
    operation: str,
    keys: Sequence[str],
    timeout_s: float,
    *,
    endpoint: str,
    at: str = "",
    setter: str = "process",
) -> StoreTimeoutError:
    """Return the error for keys that were not set in time, `at` that store."""
    names = ", ".join(map(repr, keys[:8])) + (", ..." if len(keys) > 8 else "")
    return StoreTimeoutError(
        f"{operation} of {names}{at} timed out after {timeout_s:g} s; "
        f"check the {setter} that should have set it",
        endpoint=endpoint,
        operation=operation,
        key=first_of(keys),
    )


def check_values(keys: Sequence[str], values: Sequence[str | bytes]) -> None:
    """Check that `multi_set` got a value for each key."""
    if len(keys) != len(values):
        raise InvalidArgumentError(
            f"multi_set needs as many values as keys, not {len(values)} for {len(keys)}"
        )


def first_of(keys: Sequence[str]) -> str | None:
    """Return the key that errors name."""
    return keys[0] if keys else None


def encode_key(key: str) -> bytes:
    """Return `key` as bytes."""
    if not isinstance(key, str):
        raise InvalidTypeError(f"a store's keys are str, not {type(key).__name__}: {key!r}")
    return key.encode()


def encode_value(value: str | bytes) -> bytes:
    """Return `value` as bytes."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidTypeError(f"a store's values are str or bytes, not {type(value).__name__}")


def seconds_of(timeout: timedelta) -> float:
    """Return `timeout` in seconds."""
    if not isinstance(timeout, timedelta):
        raise InvalidTypeError(f"a timeout is a datetime.timedelta, not {type(timeout).__name__}")
    seconds = timeout.total_seconds()
    if seconds <= 0:
        raise InvalidArgumentError(f"a timeout must be positive, not {seconds:g} s")
    return seconds
