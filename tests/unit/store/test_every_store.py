"""Every operation of every store, and of every client with every server: ours and PyTorch's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.errors import InvalidArgumentError, StoreError
from rallypoint.store.client import TCPStore
from rallypoint.store.file import FileStore
from rallypoint.store.local_store import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.server import StoreServer
from rallypoint.store.store import Store

TIMEOUT = timedelta(seconds=60)
MIXES = [
    "hash",
    "file",
    "prefix",
    "ours-ours",
    pytest.param("ours-torch", marks=pytest.mark.needs_torch),
    pytest.param("torch-ours", marks=pytest.mark.needs_torch),
]


@pytest.fixture(params=MIXES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """One of each kind; of two names, the first is the client's and the second the server's."""
    match request.param:
        case "hash":
            yield HashStore(TIMEOUT)
        case "file":
            with FileStore(str(tmp_path / "store"), timeout=TIMEOUT) as file:
                yield file
        case "prefix":
            yield PrefixStore("p", PrefixStore("o", HashStore(TIMEOUT)))
        case "ours-ours":
            with (
                StoreServer() as server,
                TCPStore("127.0.0.1", server.port, timeout=TIMEOUT) as ours,
            ):
                assert ours.is_ours
                yield ours
        case "ours-torch":
            import torch.distributed as torch_dist

            master = torch_dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT)
            with TCPStore("127.0.0.1", master.port, timeout=TIMEOUT) as ours:
                assert not ours.is_ours
                yield ours
        case _:
            import torch.distributed as torch_dist

            with StoreServer() as server:
                yield torch_dist.TCPStore("127.0.0.1", server.port, None, False, TIMEOUT)


def soon(action: Callable[..., object], *arguments: object) -> None:
    threading.Timer(0.05, action, arguments).start()


def test_keys(store: Store) -> None:
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.append("k", "w")
    store.append("fresh", "x")
    assert [store.get("k"), store.get("fresh")] == [b"vw", b"x"]
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    assert store.check(["k", "n"])
    assert not store.check(["k", "missing"])
    store.multi_set(["a", "b"], ["1", "2"])
    assert list(store.multi_get(["a", "b", "k"])) == [b"1", b"2", b"vw"]
    assert {"k", "n", "a", "b", "fresh"} <= set(store.list_keys())
    before = store.num_keys()
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert store.num_keys() == before - 1
    if not isinstance(store, Store):
        return  # torch's, which deletes one key at a time
    many = [f"many/{number}" for number in range(2500)]
    store.multi_set(many[::2], ["x"] * 1250)
    assert store.delete_keys(many) == 1250
    assert store.delete_keys([]) == 0
    assert store.num_keys() == before - 1


def test_values_of_any_size(store: Store) -> None:
    for size in (0, 1, 1440, 4096, 65537, 8 << 20):
        value = "x" * size
        store.set("sized", value)
        assert store.get("sized") == value.encode()
    store.set("k" * 8191, "long key")
    assert store.get("k" * 8191) == b"long key"


def test_compare_set(store: Store) -> None:
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "other", "second") == b"first"
    assert store.compare_set("c", "first", "second") == b"second"
    assert store.compare_set("missing", "expected", "new") == b"expected"
    assert not store.check(["missing"])


def test_queues(store: Store) -> None:
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert store.queue_len("q") == 2
    assert [store.queue_pop("q"), store.queue_pop("q", False)] == [b"1", b"2"]
    with pytest.raises(RuntimeError, match="empty"):
        store.queue_pop("q", False)
    assert store.queue_len("q") == 0


def test_waits_for_others(store: Store) -> None:
    other = store.clone()
    soon(other.set, "later", "1")
    assert store.get("later") == b"1"
    soon(other.queue_push, "later-queue", "2")
    assert store.queue_pop("later-queue") == b"2"
    soon(other.barrier, "barrier", 2)
    store.barrier("barrier", 2)
    soon(other.add, "later-sum", 3)
    store.wait(["later", "later-sum"])


def test_a_timed_out_wait_leaves_the_connection_usable(store: Store) -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError, match="never"):
            store.wait(["never"], timedelta(milliseconds=50))
        assert store.add("n", 0) == 0
    store.set("never", "now")
    assert store.get("never") == b"now"


def test_prefixes_nest_as_torch_nests_them() -> None:
    with StoreServer() as server, TCPStore("127.0.0.1", server.port, timeout=TIMEOUT) as store:
        inner = PrefixStore("p", PrefixStore("o", store))
        inner.set("k", "v")
        assert store.list_keys() == ["o/p/k"]
        assert inner.list_keys() == ["k"]
        assert inner.get("k") == b"v"


def test_a_prefix_passes_on_what_is_not_about_keys() -> None:
    inner = HashStore()
    outer = PrefixStore("p", inner)
    outer.set_timeout(timedelta(seconds=7))
    assert inner.timeout == outer.timeout == timedelta(seconds=7)
    outer.set("k", "v")
    assert inner.get("p/k") == b"v"
    outer.close()


def test_a_number_that_is_none() -> None:
    store = HashStore()
    store.set("k", "seven")
    with pytest.raises(StoreError, match="add to 'k' was refused: the value is not a 64-bit dec"):
        store.add("k", 1)
    assert store.get("k") == b"seven"


def test_as_many_values_as_keys() -> None:
    with pytest.raises(InvalidArgumentError, match="as many values as keys, not 1 for 2"):
        HashStore().multi_set(["a", "b"], ["1"])
