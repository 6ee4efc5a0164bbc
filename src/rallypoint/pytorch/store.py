"""PyTorch's stores as ours: members meet at the store that torch gives to the backend.

Errors become those of base/errors.py; PyTorch distinguishes them by their text only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from rallypoint.base.errors import StoreConnectionError, StoreTimeoutError
from rallypoint.store.store import Store, empty_queue

Value = TypeVar("Value")


class TorchStore(Store):
    """One of torch.distributed's stores.

    Attributes:
        host: the server's host, for a TCPStore; else None.
    """

    def __init__(self, store: Any) -> None:  # noqa: ANN401 - of torch
        self._store = store
        innermost = store
        while hasattr(innermost, "underlying_store"):
            innermost = innermost.underlying_store
        self.host: str | None = getattr(innermost, "host", None)
        port = getattr(innermost, "port", None)
        self._endpoint = f"{self.host}:{port}" if self.host else type(innermost).__name__
        super().__init__(getattr(store, "timeout", timedelta(seconds=300)))

    def set_timeout(self, timeout: timedelta) -> None:
        """See Store; the timeout is that of all handles to torch's store."""
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._call("get", key, lambda: bytes(self._store.get(key)))

    def add(self, key: str, amount: int) -> int:
        return self._call("add", key, lambda: int(self._store.add(key, amount)))

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", key, lambda: self._store.append(key, value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._call(
            "compare_set", key, lambda: bytes(self._store.compare_set(key, expected, desired))
        )

    def check(self, keys: Sequence[str]) -> bool:
        return self._call("check", keys[0], lambda: bool(self._store.check(list(keys))))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._call("wait", keys[0], lambda: self._store.wait(list(keys), timeout or self.timeout))

    def delete_key(self, key: str) -> bool:
        return self._call("delete_key", key, lambda: bool(self._store.delete_key(key)))

    def num_keys(self) -> int:
        return self._call("num_keys", "", lambda: int(self._store.num_keys()))

    def list_keys(self) -> list[str]:
        return self._call("list_keys", "", lambda: list(self._store.list_keys()))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See Store; one key at a time if torch's store has nothing better."""
        if not self._has_extended_api():
            return [self.get(key) for key in keys]
        return self._call(
            "multi_get", keys[0], lambda: [bytes(each) for each in self._store.multi_get(keys)]
        )

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._call("queue_push", key, lambda: self._store.queue_push(key, value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if not block and self.queue_len(key) == 0:
            raise empty_queue(key, self._endpoint)
        return self._call("queue_pop", key, lambda: bytes(self._store.queue_pop(key, block)))

    def queue_len(self, key: str) -> int:
        return self._call("queue_len", key, lambda: int(self._store.queue_len(key)))

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        if self.add(f"{key}/count", 1) >= world_size:
            self.set(f"{key}/all", "")
        self.wait([f"{key}/all"], timeout)

    def clone(self) -> TorchStore:
        """See Store; this handle itself, if torch's store has no others."""
        try:
            return TorchStore(self._store.clone())
        except (AttributeError, RuntimeError):  # of a store in Python
            return self

    def close(self) -> None:
        """The store is torch's to close."""

    def _has_extended_api(self) -> bool:
        return hasattr(self._store, "has_extended_api") and bool(self._store.has_extended_api())

    def _call(self, operation: str, key: str, function: Callable[[], Value]) -> Value:
        with self._errors(operation, key):
            return function()

    @contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the base class of torch's DistError
            words = str(error).partition("\n")[0]
            is_late = "timeout" in words.lower() or "timed out" in words.lower()
            kind = StoreTimeoutError if is_late else StoreConnectionError
            raise kind(
                f"{operation} of {key!r} at torch's store {self._endpoint} failed: {words}",
                endpoint=self._endpoint,
                operation=operation,
                key=key or None,
            ) from error
