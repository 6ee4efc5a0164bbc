"""What every store can do: the interface of torch.distributed's stores, for str keys.

Values go in as str or bytes and come out as bytes. What an implementation derives from simpler
operations stands here once; nothing here fails for want of an implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError, QueueEmptyError

DEFAULT_TIMEOUT = timedelta(seconds=300)


class Store(ABC):
    """A set of keys with values, and queues, that several processes share.

    Every operation ends within the timeout: with StoreTimeoutError when a key does not appear,
    with StoreConnectionError when the store cannot be reached.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long an operation waits unless told otherwise."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations wait."""
        seconds_of(timeout)
        self._timeout = timeout

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key`, in place of what was there."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the value of `key`, waiting for it if need be."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number under `key`, 0 if it is missing; return the sum."""

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None:
        """Put `value` behind what is stored under `key`, if anything."""

    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if `key` holds `expected`, or is missing and `expected` is empty.

        Returns what `key` holds then, or `expected` if the key is missing still.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all `keys` are there, without waiting."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Delete `key`; tell whether it was there."""

    def delete_keys(self, keys: Sequence[str]) -> int:
        """Delete several keys; how many of them were there."""
        return sum(map(self.delete_key, keys))

    @abstractmethod
    def num_keys(self) -> int:
        """Return how many keys there are."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """Return all keys, in no particular order."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all `keys`, waiting for them if need be."""

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values at once."""

    @abstractmethod
    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put `value` at the end of the queue `key`."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of the queue `key`.

        Raises:
            QueueEmptyError: there is none, and `block` is false.
        """

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """Return how many values the queue `key` holds."""

    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until `world_size` callers are here. A `key` serves once."""

    @abstractmethod
    def clone(self) -> Store:
        """Return another handle to the same store, for another thread."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the store; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def empty_queue(key: str, endpoint: str) -> QueueEmptyError:
    """Return the error of a pop that would not wait."""
    return QueueEmptyError(
        f"the queue {key!r} at {endpoint} is empty; pass block=True to wait for a value",
        endpoint=endpoint,
        operation="queue_pop",
        key=key,
    )


def encode_key(key: str) -> bytes:
    """Return `key` as bytes.

    Raises:
        InvalidTypeError: it is not a str.
    """
    if not isinstance(key, str):
        raise InvalidTypeError(f"a store's keys are str, not {type(key).__name__}: {key!r}")
    return key.encode()


def encode_value(value: str | bytes) -> bytes:
    """Return `value` as bytes.

    Raises:
        InvalidTypeError: it is neither str nor bytes.
    """
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidTypeError(f"a store's values are str or bytes, not {type(value).__name__}")


def seconds_of(timeout: timedelta) -> float:
    """Return `timeout` in seconds.

    Raises:
        InvalidTypeError: it is no timedelta.
        InvalidArgumentError: it is not positive.
    """
    if not isinstance(timeout, timedelta):
        raise InvalidTypeError(f"a timeout is a datetime.timedelta, not {type(timeout).__name__}")
    seconds = timeout.total_seconds()
    if seconds <= 0:
        raise InvalidArgumentError(f"a timeout must be positive, not {seconds:g} s")
    return seconds
