"""A store's one value as a keeper's keys: held against a plain dict, and against other writers."""

from __future__ import annotations

from random import Random

import pytest

from rallypoint.base.errors import ControlMessageError
from rallypoint.rendezvous.keyvalue.keeper import Transact
from rallypoint.rendezvous.keyvalue.store_client import OneValue, StoreClient, Swap
from rallypoint.store.local_store import HashStore

KEYS = ("a/x", "a/y", "b/z")


class Counting(HashStore):
    """A store that counts its operations."""

    count = 0

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self.count += 1
        return super().compare_set(key, expected, desired)


def test_any_transactions_are_those_of_a_dict(seed: int) -> None:
    chance = Random(seed)
    store = HashStore()
    clients = [StoreClient(store.clone(), "job") for _ in range(3)]
    known: dict[str, tuple[bytes, int]] = {}
    revision = 0
    for number in range(300):
        client = chance.choice(clients)
        wanted = chance.sample(KEYS, chance.randint(0, 3))
        revisions = {key: known.get(key, (b"", 0))[1] for key in wanted}
        if wanted and chance.random() < 0.3:
            revisions[wanted[0]] += 1
        puts = dict.fromkeys(chance.sample(KEYS, 2), b"%d\n%d" % (number, number))
        deletes = tuple(key for key in KEYS if key not in puts and chance.random() < 0.3)
        holds = all(known.get(key, (b"", 0))[1] == each for key, each in revisions.items())
        done = client.transact(Transact(revisions=revisions, puts=puts, deletes=deletes))
        assert (done is not None) == holds
        if done is not None:
            assert done == revision + 1
            revision = done
            known.update((key, (value, done)) for key, value in puts.items())
            known = {key: value for key, value in known.items() if key not in deletes}
        prefix = chance.choice(["a/", "b/", ""])
        found = chance.choice(clients).read(prefix)
        assert found.revision == revision
        assert [(pair.key, (pair.value, pair.revision)) for pair in found.pairs] == [
            item for item in sorted(known.items()) if item[0].startswith(prefix)
        ]


def test_who_writes_alone_needs_one_operation() -> None:
    store = Counting()
    client = StoreClient(store, "job")
    heartbeat = client.transact(Transact(revisions={"heartbeat": 0}, puts={"heartbeat": b"0"}))
    before = store.count
    for number in range(5):
        assert heartbeat is not None
        heartbeat = client.transact(
            Transact(revisions={"heartbeat": heartbeat}, puts={"heartbeat": b"%d" % number})
        )
    assert store.count == before + 5


def test_a_write_between_look_and_swap_is_seen() -> None:
    first, second = OneValue(), OneValue()
    held = b""

    def perform(swap: Swap) -> bytes:
        nonlocal held
        held = swap.desired if swap.expected == held else held
        return held

    slow = first.transact(Transact(revisions={"claim": 0}, puts={"claim": b"first"}))
    asked = next(slow)  # on its way
    fast = second.transact(Transact(revisions={"claim": 0}, puts={"claim": b"second"}))
    with pytest.raises(StopIteration) as end:
        fast.send(perform(next(fast)))
    assert end.value.value == 1
    with pytest.raises(StopIteration) as end:
        slow.send(perform(asked))
    assert end.value.value is None


def test_what_the_store_lost_is_not_there() -> None:
    store = HashStore()
    client = StoreClient(store, "job")
    written = client.transact(Transact(revisions={}, puts={"claim": b"mine"}))
    assert written is not None
    store.delete_key("job")
    assert client.transact(Transact(revisions={"claim": written}, puts={"heartbeat": b"1"})) is None
    assert client.read("").pairs == ()


@pytest.mark.parametrize("held", [b"what is this", b'["rallypoint 1",1,[["a",1,9]]]\nshort', b"[]"])
def test_something_else_is_refused(held: bytes) -> None:
    store = HashStore()
    store.set("job", held)
    with pytest.raises(ControlMessageError, match="of this version"):
        StoreClient(store, "job").read("")


def test_a_store_has_no_leases() -> None:
    """So the only one has no name, and never ends; others are those of another keeper."""
    store = HashStore()
    client = StoreClient(store.clone(), "job")
    lease = client.grant(60)
    assert client.keep_alive(lease)
    assert not client.keep_alive("7")
    write = Transact(revisions={"job/x": 0}, puts={"job/x": b"1"}, lease=lease)
    assert client.transact(write) is not None
    client.close()
