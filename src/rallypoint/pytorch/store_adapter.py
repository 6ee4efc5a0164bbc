"""Our store in the form of PyTorch's, for PyTorch's backends that serve our groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rallypoint.base.errors import StoreError, StoreTimeoutError
from rallypoint.store.store import Store


class StoreAdapter(dist.Store):
    """The store that PyTorch's C++ calls; it recognises a store's errors by their text."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        try:
            self._store.wait(list(keys), timeout)
        except StoreTimeoutError as error:
            raise dist.DistStoreError(f"wait timeout: {error}") from None
        except StoreError as error:
            raise dist.DistNetworkError(str(error)) from None

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(list(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._store.multi_set(list(keys), list(values))

    def has_extended_api(self) -> bool:
        """Whether it has append, multi_get and multi_set."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)
