"""The operations of stores whose contents each process holds itself: HashStore and FileStore.

An operation borrows the contents, reads them, and changes them by `StoreContents.change`. The
subclass lends them to one operation at a time and passes the changes on: HashStore wakes the other
threads, FileStore writes to its file. Counters are decimal text that is read as torch reads it.
"""

from __future__ import annotations

import re
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple, TypeVar

from rallypoint.base.errors import StoreError
from rallypoint.store.store import (
    DEFAULT_TIMEOUT,
    Store,
    check_values,
    empty_queue,
    encode_key,
    encode_value,
    first_of,
    seconds_of,
    wait_timed_out,
)

T = TypeVar("T")

_DECIMAL = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_MAX_DIGITS = 4000  # int() refuses more


class ChangeKind(IntEnum):
    """What a change does."""

    SET = 1
    DELETE = 2
    PUSH = 3
    POP = 4
    JOIN = 5  # key: the member's identity
    LEAVE = 6


class Change(NamedTuple):
    """One change to the store."""

    kind: ChangeKind
    key: bytes
    value: bytes = b""


@dataclass(slots=True)
class StoreContents:
    """Keys and queues.

    Attributes:
        members: of a FileStore; those that have not left are True.
        changes: those made by `change`, for callers that lend out the contents.
        count: how many changes were ever applied.
    """

    values: dict[str, bytes] = field(default_factory=dict)
    queues: dict[str, deque[bytes]] = field(default_factory=dict)
    members: dict[bytes, bool] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    count: int = 0

    def has(self, key: str) -> bool:
        """Tell whether a waiter for `key` has nothing to wait for."""
        return key in self.values or key in self.queues

    def change(self, kind: ChangeKind, key: str | bytes, value: bytes = b"") -> None:
        """Make a change."""
        change = Change(kind, key if isinstance(key, bytes) else encode_key(key), value)
        self.apply(change)
        self.changes.append(change)

    def apply(self, change: Change) -> None:
        """Do what `change` says, without recording it."""
        self.count += 1
        key = change.key.decode()
        match change.kind:
            case ChangeKind.SET:
                self.values[key] = change.value
            case ChangeKind.DELETE:
                self.values.pop(key, None)
            case ChangeKind.PUSH:
                self.queues.setdefault(key, deque()).append(change.value)
            case ChangeKind.POP:
                self.queues[key].popleft()
                if not self.queues[key]:
                    del self.queues[key]
            case ChangeKind.JOIN:
                self.members[change.key] = True
            case ChangeKind.LEAVE:
                self.members[change.key] = False

    def take(self, key: str) -> bytes | None:
        """Remove and return the first value of the queue `key`; None: it is empty."""
        queue = self.queues.get(key)
        if queue is None:
            return None
        value = queue[0]
        self.change(ChangeKind.POP, key)
        return value


class LocalStore(Store):
    """A store by its contents."""

    # For errors: the store's name, where it is, and what sets its keys.
    _endpoint: str
    _at = ""
    _setter = "process"

    @abstractmethod
    def _hold(
        self, operation: str, key: str | None, *, writes: bool = True
    ) -> AbstractContextManager[StoreContents]:
        """Lend out the contents, for reading only unless the operation `writes`."""

    @abstractmethod
    def _pause(self, count: int, left_s: float) -> None:
        """Wait until there may be more than `count` changes, or `left_s` are over."""

    def _await(
        self,
        operation: str,
        keys: Sequence[str],
        read: Callable[[StoreContents], T | None],
        timeout: timedelta | None = None,
        *,
        writes: bool = False,
    ) -> T:
        """Lend out the contents to `read` until it returns something; return that."""
        timeout_s = seconds_of(timeout or self._timeout)
        deadline = time.monotonic() + timeout_s
        while True:
            with self._hold(operation, first_of(keys), writes=writes) as contents:
                if (found := read(contents)) is not None:
                    return found
                count = contents.count
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise wait_timed_out(
                    operation,
                    keys,
                    timeout_s,
                    endpoint=self._endpoint,
                    at=self._at,
                    setter=self._setter,
                )
            self._pause(count, left_s)

    def _subject(self, operation: str, key: str | None) -> str:
        """What errors call the operation."""
        name = "" if key is None else f" of {key!r}"
        return f"{operation}{name}{self._at}"

    # Keys.

    def set(self, key: str, value: str | bytes) -> None:
        with self._hold("set", key) as contents:
            contents.change(ChangeKind.SET, key, encode_value(value))

    def add(self, key: str, amount: int) -> int:
        with self._hold("add", key) as contents:
            number = number_in(contents.values.get(key, b"0"))
            if number is None:
                raise self._refusal("add", key, "the value is not a 64-bit decimal number")
            total = wrapped(number + amount)
            contents.change(ChangeKind.SET, key, b"%d" % total)
            return total

    def append(self, key: str, value: str | bytes) -> None:
        more = encode_value(value)
        with self._hold("append", key) as contents:
            contents.change(ChangeKind.SET, key, contents.values.get(key, b"") + more)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = encode_value(expected), encode_value(desired)
        with self._hold("compare_set", key) as contents:
            before = contents.values.get(key)
            if before is None and old:
                return old
            if before is None or before == old:
                contents.change(ChangeKind.SET, key, new)
                return new
            return before

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        def found(contents: StoreContents) -> list[bytes] | None:
            if not all(map(contents.has, keys)):
                return None
            return [contents.values.get(key, b"") for key in keys]

        return self._await("get", keys, found)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        check_values(keys, values)
        pairs = list(zip(keys, map(encode_value, values), strict=True))
        with self._hold("multi_set", first_of(keys)) as contents:
            for key, value in pairs:
                contents.change(ChangeKind.SET, key, value)

    def check(self, keys: Sequence[str]) -> bool:
        with self._hold("check", first_of(keys), writes=False) as contents:
            return all(map(contents.has, keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await("wait", keys, lambda c: all(map(c.has, keys)) or None, timeout)

    def delete_key(self, key: str) -> bool:
        with self._hold("delete_key", key) as contents:
            is_there = key in contents.values
            if is_there:
                contents.change(ChangeKind.DELETE, key)
            return is_there

    def num_keys(self) -> int:
        with self._hold("num_keys", None, writes=False) as contents:
            return len(contents.values)

    def list_keys(self) -> list[str]:
        with self._hold("list_keys", None, writes=False) as contents:
            return list(contents.values)

    # Queues and barriers.

    def queue_push(self, key: str, value: str | bytes) -> None:
        with self._hold("queue_push", key) as contents:
            contents.change(ChangeKind.PUSH, key, encode_value(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if block:
            return self._await("queue_pop", [key], lambda c: c.take(key), writes=True)
        with self._hold("queue_pop", key) as contents:
            value = contents.take(key)
        if value is None:
            raise empty_queue(key, self._endpoint)
        return value

    def queue_len(self, key: str) -> int:
        with self._hold("queue_len", key, writes=False) as contents:
            return len(contents.queues.get(key, ()))

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        self.add(key, 1)
        self._await("barrier", [key], lambda c: int(c.values[key]) >= world_size or None, timeout)

    def _refusal(
        self, operation: str, key: str | None, text: str, kind: type[StoreError] = StoreError
    ) -> StoreError:
        return kind(
            f"{self._subject(operation, key)} was refused: {text}",
            endpoint=self._endpoint,
            operation=operation,
            key=key,
        )


def number_in(value: bytes) -> int | None:
    """Return the number that `value` begins with: blanks, a sign, digits, whatever follows.

    None if there is none, or if it does not fit in 64 bits.
    """
    digits = _DECIMAL.match(value)
    if digits is None or len(digits[1]) > _MAX_DIGITS:
        return None
    number = int(digits[1])
    return number if -(2**63) <= number < 2**63 else None


def wrapped(number: int) -> int:
    """As 64-bit addition: past the end it starts again at the other one."""
    return (number + 2**63) % 2**64 - 2**63


class HashStore(LocalStore):
    """A store that threads share; `clone` gives each its own handle with its own timeout."""

    _endpoint = "this process"
    _setter = "thread"

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._contents = StoreContents()
        self._changed = threading.Condition()  # guards the contents

    def clone(self) -> HashStore:
        other = HashStore(self._timeout)
        other._contents, other._changed = self._contents, self._changed
        return other

    def close(self) -> None:
        """Nothing to let go of."""

    @contextmanager
    def _hold(
        self, operation: str, key: str | None, *, writes: bool = True
    ) -> Iterator[StoreContents]:
        if key is not None:
            encode_key(key)
        with self._changed:
            try:
                yield self._contents
            finally:
                if self._contents.changes:
                    self._contents.changes.clear()
                    self._changed.notify_all()

    def _pause(self, count: int, left_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._contents.count != count, left_s)

    def _subject(self, operation: str, key: str | None) -> str:
        return f"{operation} to {key!r}"
