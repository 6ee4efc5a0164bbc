"""A store as a keeper of agreements: all of a job's keys are the value of one of the store's keys.

Keys of a store do not expire, so there are no leases; all else is in one_value.py.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from rallypoint.rendezvous.keyvalue.key_value_client import KeyValueClient, Snapshot
from rallypoint.rendezvous.keyvalue.one_value import OneValue, Swap
from rallypoint.store.store import Store

T = TypeVar("T")


class StoreClient(KeyValueClient):
    """See KeyValueClient.

    Args:
        store: for this client alone; closed with it.
        key: whose value holds it all.

    Raises:
        ControlMessageError: the key holds something else.
        StoreError: the store cannot be reached.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._value = OneValue()

    def read(self, prefix: str) -> Snapshot:
        return self._perform(self._value.read(prefix))

    def transact(
        self,
        *,
        revisions: Mapping[str, int],
        puts: Mapping[str, bytes],
        deletes: Sequence[str] = (),
        lease: int = 0,
        leases: Mapping[str, int] = MappingProxyType({}),
    ) -> int | None:
        del lease, leases
        return self._perform(self._value.transact(revisions, puts, deletes))

    def grant(self, ttl_s: int) -> int:
        del ttl_s
        return 0

    def keep_alive(self, lease: int) -> bool:
        return not lease

    def close(self) -> None:
        self._store.close()

    def _perform(self, swaps: Generator[Swap, bytes, T]) -> T:
        try:
            swap = next(swaps)
            while True:
                swap = swaps.send(self._store.compare_set(self._key, swap.expected, swap.desired))
        except StopIteration as end:
            result: T = end.value
            return result
