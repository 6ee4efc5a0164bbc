"""A job's keys as the one value of one key in a store, which only needs to compare and set.

    Read ------> look -----------------------------------------> Snapshot
    Transact --> check the revisions in what was seen last --> swap --> the new revision
                        ^                                        |
                        +---- another write came in between -----+       (None: they do not hold)

A look is a swap of nothing for nothing: it never waits, as a store's `get` does for a missing key.
No value comes twice, as its revision grows with each write. Pure: store_client.py performs swaps.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.record import Record
from rallypoint.rendezvous.keyvalue.key_value_client import Pair, Snapshot

_FORMAT = "rallypoint 1"


class Swap(Record):
    """compare_set: put `desired` in place of `expected`; what the key holds then comes back."""

    expected: bytes
    desired: bytes


_LOOK = Swap(b"", b"")
Swaps = Generator[Swap, bytes, "int | None"]


class OneValue:
    """The value as one agent knows it: a second write before any other agent's needs one swap."""

    def __init__(self) -> None:
        self._seen = b""

    def read(self, prefix: str) -> Generator[Swap, bytes, Snapshot]:
        """See KeyValueClient."""
        seen = yield _LOOK
        revision, pairs = decode_value(seen)
        self._seen = seen
        found = [pair for key, pair in sorted(pairs.items()) if key.startswith(prefix)]
        return Snapshot(tuple(found), revision)

    def transact(
        self, revisions: Mapping[str, int], puts: Mapping[str, bytes], deletes: Sequence[str]
    ) -> Swaps:
        """See KeyValueClient."""
        seen, is_newest = self._seen, False
        while True:
            revision, pairs = decode_value(seen)
            if _hold(pairs, revisions):
                revision += 1
                pairs.update((key, Pair(key, value, revision)) for key, value in puts.items())
                kept = [pair for key, pair in pairs.items() if key not in deletes]
                desired = encode_value(revision, kept)
                held = yield Swap(seen, desired)
                if held == desired:
                    self._seen = desired
                    return revision
                if held == seen:  # it is not there any more: the store lost it
                    held = yield _LOOK
            elif is_newest:
                return None
            else:
                held = yield _LOOK
            seen, is_newest = held, True


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
    """The revision, and all pairs by key; empty bytes mean that nothing has been written yet.

    Raises:
        ControlMessageError: it is not such a value.
    """
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
