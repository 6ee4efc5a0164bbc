"""A store as a keeper: all of a job's keys are the value of one key, which is compared and set.

    Read ------> read the value -------------------------------> Snapshot
    Transact --> check the revisions in what was read last --> swap --> the new revision
                        ^                                        |
                        +---- another write came in between -----+       (None: they do not hold)

A read is a swap of nothing for nothing: it never waits, as a store's `get` does for a missing key.
No value comes twice, as its revision grows with each write. Keys of a store do not expire, so there
are no leases. Swaps are yielded, for StoreClient and for tests to perform: pure except for the
store.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import TypeVar

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.record import Record
from rallypoint.rendezvous.keyvalue.keeper import KeyValueClient, Pair, Snapshot, Transact
from rallypoint.store.store import Store

T = TypeVar("T")

_FORMAT = "rallypoint 1"


class Swap(Record):
    """compare_set: put `desired` in place of `expected`; what the key holds then comes back."""

    expected: bytes
    desired: bytes


_READ = Swap(b"", b"")


class OneValue:
    """The value as one agent knows it: a second write before any other agent's needs one swap."""

    def __init__(self) -> None:
        self._known = b""

    def read(self, prefix: str) -> Generator[Swap, bytes, Snapshot]:
        """See KeyValueClient."""
        known = yield _READ
        revision, pairs = decode_value(known)
        self._known = known
        found = [pair for key, pair in sorted(pairs.items()) if key.startswith(prefix)]
        return Snapshot(tuple(found), revision)

    def transact(self, request: Transact) -> Generator[Swap, bytes, int | None]:
        """See KeyValueClient."""
        known, is_newest = self._known, False
        while True:
            revision, pairs = decode_value(known)
            if _hold(pairs, request.revisions):
                revision += 1
                pairs.update(
                    (key, Pair(key, value, revision)) for key, value in request.puts.items()
                )
                kept = [pair for key, pair in pairs.items() if key not in request.deletes]
                desired = encode_value(revision, kept)
                held = yield Swap(known, desired)
                if held == desired:
                    self._known = desired
                    return revision
                if held == known:  # it is not there any more: the store lost it
                    held = yield _READ
            elif is_newest:
                return None
            else:
                held = yield _READ
            known, is_newest = held, True


def _hold(pairs: Mapping[str, Pair], revisions: Mapping[str, int]) -> bool:
    return all(
        (pairs[key].revision if key in pairs else 0) == revision
        for key, revision in revisions.items()
    )


def encode_value(revision: int, pairs: Sequence[Pair]) -> bytes:
    """A line that says what follows it, and the values in a row."""
    index = [[pair.key, pair.revision, len(pair.value)] for pair in pairs]
    head = json.dumps([_FORMAT, revision, index], separators=(",", ":")).encode("ascii")
    return b"\n".join([head, b"".join([pair.value for pair in pairs])])


def decode_value(data: bytes) -> tuple[int, dict[str, Pair]]:
    """The revision, and all pairs by key; empty bytes mean that nothing has been written yet."""
    if not data:
        return 0, {}
    head, _, rest = data.partition(b"\n")
    pairs: dict[str, Pair] = {}
    start = 0
    try:
        form, revision, index = json.loads(head)
        for key, written, size in index:
            pairs[key] = Pair(key, rest[start : start + size], written)
            start += size
    except (ValueError, TypeError):
        form, revision = "", 0
    if form != _FORMAT or start != len(rest):
        raise ControlMessageError(
            f"the stored value is not from a rendezvous of this version: {data[:80]!r}."
        )
    return revision, pairs


class StoreClient(KeyValueClient):
    """See KeyValueClient.

    Args:
        store: for this client alone; closed with it.
        key: whose value holds it all.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._value = OneValue()

    def read(self, prefix: str) -> Snapshot:
        return self._perform(self._value.read(prefix))

    def transact(self, request: Transact) -> int | None:
        return self._perform(self._value.transact(request))

    def grant(self, ttl_s: int) -> str:
        return ""

    def keep_alive(self, lease: str) -> bool:
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
