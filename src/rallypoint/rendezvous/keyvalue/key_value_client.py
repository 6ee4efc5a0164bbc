"""What a keeper of agreements must support: a few keys with their revisions, changed atomically.

etcd supports it directly (etcd_client.py); in a store all keys are one value (store_client.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple


class Pair(NamedTuple):
    """A key with its value, and the keeper's revision at which it was last written."""

    key: str
    value: bytes
    revision: int


class Snapshot(NamedTuple):
    """The pairs under a prefix, as they were at one revision of the keeper."""

    pairs: tuple[Pair, ...]
    revision: int


class KeyValueClient(ABC):
    """One agent's connection to a keeper; it belongs to one thread."""

    @abstractmethod
    def read(self, prefix: str) -> Snapshot:
        """Return all pairs whose keys start with `prefix`."""

    @abstractmethod
    def transact(
        self,
        *,
        revisions: Mapping[str, int],
        puts: Mapping[str, bytes],
        deletes: Sequence[str] = (),
        lease: int = 0,
        leases: Mapping[str, int] = MappingProxyType({}),
    ) -> int | None:
        """Write all of `puts` and `deletes`, if each key still has its revision in `revisions`.

        Revision 0 says that the key must not exist. The first value must be one that no other write
        ever puts. Values may be bound to `lease`, or to the key's own in `leases`.

        Returns:
            The keeper's revision after the write; None: a condition did not hold.
        """

    @abstractmethod
    def grant(self, ttl_s: int) -> int:
        """Return a new lease; 0 where keys do not expire."""

    @abstractmethod
    def keep_alive(self, lease: int) -> bool:
        """Restart the lease's time; False if it has ended."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""
