"""A store for the threads of one process: dictionaries, a lock, and a condition to wait on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rallypoint.store.local_store import LocalStore, StoreContents
from rallypoint.store.store import DEFAULT_TIMEOUT, encode_key


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
