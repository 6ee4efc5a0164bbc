"""What a keeper of agreements must be able to do: a few keys with their revisions, changed at once.

etcd does it by itself (etcd_client.py); in a store all keys are one value (store_client.py).
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
    """One agent's way to a keeper; it belongs to one thread."""

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

        Revision 0 says that the key must not exist. The first value that is put is one that no
        other write ever puts. What is put may end with `lease`, or with the key's own in `leases`.

        Returns:
            The keeper's revision after the write; None: a condition did not hold.
        """

    @abstractmethod
    def grant(self, ttl_s: int) -> int:
        """Return a new lease; 0 where nothing ends by itself."""

    @abstractmethod
    def keep_alive(self, lease: int) -> bool:
        """Start the lease's time anew; False if it has ended."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""
