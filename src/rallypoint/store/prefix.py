"""A store inside a store: every key gets a prefix, nested as torch's PrefixStore nests them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from rallypoint.store.store import Store


class PrefixStore(Store):
    """Adds ``prefix + "/"`` before every key of `store`.

    `num_keys` counts all keys of the underlying store and `set_timeout` changes its timeout, as
    torch's do; `list_keys` lists those with the prefix, without it.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self.prefix = prefix
        self.underlying_store = store

    @property
    def timeout(self) -> timedelta:
        """The underlying store's."""
        return self.underlying_store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the underlying store's timeout."""
        self.underlying_store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        return self.underlying_store.get(self._full(key))

    def add(self, key: str, amount: int) -> int:
        return self.underlying_store.add(self._full(key), amount)

    def append(self, key: str, value: str | bytes) -> None:
        self.underlying_store.append(self._full(key), value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self.underlying_store.compare_set(self._full(key), expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        return self.underlying_store.check([self._full(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.underlying_store.wait([self._full(key) for key in keys], timeout)

    def delete_key(self, key: str) -> bool:
        return self.underlying_store.delete_key(self._full(key))

    def delete_keys(self, keys: Sequence[str]) -> int:
        return self.underlying_store.delete_keys([self._full(key) for key in keys])

    def num_keys(self) -> int:
        """Return how many keys the underlying store has, with the prefix or without."""
        return self.underlying_store.num_keys()

    def list_keys(self) -> list[str]:
        start = self._full("")
        return [
            k.removeprefix(start) for k in self.underlying_store.list_keys() if k.startswith(start)
        ]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.underlying_store.multi_get([self._full(key) for key in keys])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self.underlying_store.multi_set([self._full(key) for key in keys], values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self.underlying_store.queue_push(self._full(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self.underlying_store.queue_pop(self._full(key), block)

    def queue_len(self, key: str) -> int:
        return self.underlying_store.queue_len(self._full(key))

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        self.underlying_store.barrier(self._full(key), world_size, timeout)

    def clone(self) -> PrefixStore:
        """Return the same prefix over a clone of the underlying store."""
        return PrefixStore(self.prefix, self.underlying_store.clone())

    def close(self) -> None:
        """Close the underlying store."""
        self.underlying_store.close()

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"
