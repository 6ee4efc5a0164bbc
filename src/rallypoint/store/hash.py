"""A store for the threads of one process: a dictionary, a lock, and a condition to wait on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from rallypoint.base.errors import InvalidArgumentError, StoreError, StoreTimeoutError
from rallypoint.store.counters import number_in, wrapped
from rallypoint.store.store import (
    DEFAULT_TIMEOUT,
    Store,
    empty_queue,
    encode_key,
    encode_value,
    seconds_of,
)

_ENDPOINT = "this process"


class _Shared:
    """What all handles to one HashStore have in common."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}

    def has(self, key: str) -> bool:
        return key in self.values or bool(self.queues.get(key))


class HashStore(Store):
    """A store that threads share; `clone` gives each its own handle with its own timeout."""

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._shared = _Shared()

    def set(self, key: str, value: str | bytes) -> None:
        self._put(key, lambda _: encode_value(value))

    def add(self, key: str, amount: int) -> int:
        def added(before: bytes | None) -> bytes:
            number = 0 if before is None else number_in(before)
            if number is None:
                raise StoreError(
                    f"add to {key!r} was refused: the value is not a 64-bit decimal number",
                    endpoint=_ENDPOINT,
                    operation="add",
                    key=key,
                )
            return b"%d" % wrapped(number + amount)

        return int(self._put(key, added))

    def append(self, key: str, value: str | bytes) -> None:
        self._put(key, lambda before: (before or b"") + encode_value(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = encode_value(expected), encode_value(desired)
        with self._shared.changed:
            before = self._shared.values.get(key)
            if before is None and old:
                return old
            if before is None or before == old:
                return self._put(key, lambda _: new)
            return before

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        with self._shared.changed:
            return all(self._shared.has(key) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await("wait", keys, lambda: all(map(self._shared.has, keys)), timeout)

    def delete_key(self, key: str) -> bool:
        with self._shared.changed:
            return self._shared.values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._shared.values)

    def list_keys(self) -> list[str]:
        with self._shared.changed:
            return list(self._shared.values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._shared.changed:
            self._await("get", keys, lambda: all(map(self._shared.has, keys)), None)
            return [self._shared.values.get(key, b"") for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise InvalidArgumentError(
                f"multi_set needs as many values as keys, not {len(values)} for {len(keys)}"
            )
        with self._shared.changed:
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

    def queue_push(self, key: str, value: str | bytes) -> None:
        encode_key(key)
        with self._shared.changed:
            self._shared.queues.setdefault(key, deque()).append(encode_value(value))
            self._shared.changed.notify_all()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        with self._shared.changed:
            if block:
                self._await("queue_pop", [key], lambda: bool(self._shared.queues.get(key)), None)
            queue = self._shared.queues.get(key)
            if not queue:
                raise empty_queue(key, _ENDPOINT)
            value = queue.popleft()
            if not queue:
                del self._shared.queues[key]
            return value

    def queue_len(self, key: str) -> int:
        return len(self._shared.queues.get(key, ()))

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        with self._shared.changed:
            self.add(key, 1)
            self._await(
                "barrier", [key], lambda: int(self._shared.values[key]) >= world_size, timeout
            )

    def clone(self) -> HashStore:
        other = HashStore(self._timeout)
        other._shared = self._shared
        return other

    def close(self) -> None:
        """Nothing to let go of."""

    def _put(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        encode_key(key)
        with self._shared.changed:
            value = self._shared.values[key] = change(self._shared.values.get(key))
            self._shared.changed.notify_all()
            return value

    def _await(
        self,
        operation: str,
        keys: Sequence[str],
        ready: Callable[[], bool],
        timeout: timedelta | None,
    ) -> None:
        timeout_s = seconds_of(timeout or self._timeout)
        deadline = time.monotonic() + timeout_s
        with self._shared.changed:
            while not ready():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise StoreTimeoutError(
                        f"{operation} of {', '.join(map(repr, keys))} timed out after "
                        f"{timeout_s:g} s; check the thread that should have set it",
                        endpoint=_ENDPOINT,
                        operation=operation,
                        key=keys[0] if keys else None,
                    )
                self._shared.changed.wait(left_s)
