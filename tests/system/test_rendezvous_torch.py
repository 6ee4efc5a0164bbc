"""The same story told by PyTorch's DynamicRendezvousHandler and by ours: the same answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.system.meetings import Call, meet, until

from rallypoint.rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer

pytestmark = [pytest.mark.system, pytest.mark.needs_torch]

Make = Callable[..., Any]


def _torchs(port: int) -> Make:
    import torch.distributed as torch_dist
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

    def make(least: int, most: int, join_s: float) -> Any:
        store = torch_dist.TCPStore("127.0.0.1", port, None, False)
        return dynamic_rendezvous.DynamicRendezvousHandler.from_backend(
            "r",
            store,
            c10d_rendezvous_backend.C10dRendezvousBackend(store, "r"),
            least,
            most,
            local_addr="127.0.0.1",
            timeout=dynamic_rendezvous.RendezvousTimeout(
                join=timedelta(seconds=join_s), last_call=timedelta(seconds=1)
            ),
            keep_alive_interval=2,
            keep_alive_max_attempt=15,
        )

    return make


def _ours(stores: list[TCPStore], port: int) -> Make:
    def make(least: int, most: int, join_s: float) -> Any:
        stores.append(TCPStore("127.0.0.1", port))
        return DynamicRendezvousHandler.from_backend(
            "r",
            stores[-1],
            "c10d",
            least,
            most,
            local_addr="127.0.0.1",
            timeout=RendezvousTimeout(
                join=timedelta(seconds=join_s), last_call=timedelta(seconds=1)
            ),
            keep_alive_interval=2,
            keep_alive_max_attempt=15,
        )

    return make


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Make]]:
    """Makers of both; ours serves the store to either."""
    # Else PyTorch's node 0 tells its address in its first round only, and who joins later waits
    # for it without end.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    stores: list[TCPStore] = []
    with StoreServer() as mine, StoreServer() as theirs:
        yield [_torchs(theirs.port), _ours(stores, mine.port)]
        for store in stores:
            store.close()


def _grows(make: Make) -> Iterator[object]:
    first, second = make(2, 3, 300), make(2, 3, 300)
    places = meet(first, second)
    yield sorted((place.rank, place.world_size) for place in places)
    yield first.num_nodes_waiting()
    places[0].store.set("k", "v")
    yield bytes(places[1].store.get("k"))
    yield len({str(_address_of(place)) for place in places})
    third = make(2, 3, 300)
    call = Call(third)
    until(lambda: first.num_nodes_waiting() and second.num_nodes_waiting())
    yield first.num_nodes_waiting(), second.num_nodes_waiting()
    again = [*meet(first, second), call.result()]
    yield sorted((place.rank, place.world_size) for place in again)
    yield [bool(place.store.check(["k"])) for place in again]
    yield [handler.num_nodes_waiting() for handler in (first, second, third)]
    yield first.get_backend(), first.get_run_id()
    yield first.shutdown()
    until(lambda: second.is_closed() and third.is_closed())
    yield _error_of(second)
    yield second.shutdown(), third.shutdown()


def _is_full(make: Make) -> Iterator[object]:
    first, second = make(2, 2, 20), make(2, 2, 20)
    meet(first, second)
    late = make(2, 2, 1)
    call = Call(late)
    time.sleep(2.5)
    yield call.waits, first.num_nodes_waiting(), first.is_closed()
    first.set_closed()
    until(second.is_closed)
    yield _error_of(make(2, 2, 20)), _error_of(call)
    yield [handler.shutdown() for handler in (first, second, late)]


def _is_alone(make: Make) -> Iterator[object]:
    alone = make(2, 3, 2)
    yield _error_of(alone)
    yield alone.is_closed()
    other = make(2, 3, 20)
    alone.shutdown()
    until(other.is_closed)
    yield _error_of(other)
    yield other.shutdown()


def _address_of(place: Any) -> object:
    info = place.bootstrap_store_info
    return info.master_addr, info.master_port


def _error_of(handler: Any) -> str:
    try:
        handler.result() if isinstance(handler, Call) else handler.next_rendezvous()
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("story", [_grows, _is_full, _is_alone])
def test_the_same_story(story: Callable[[Make], Iterator[object]], both: list[Make]) -> None:
    torchs, ours = [list(story(make)) for make in both]
    assert ours == torchs


def test_ours_meet_at_torchs_server() -> None:
    import torch.distributed as torch_dist

    master = torch_dist.TCPStore("127.0.0.1", 0, None, True)
    stores: list[TCPStore] = []
    make = _ours(stores, master.port)
    first, second = make(2, 2, 20), make(2, 2, 20)
    assert not stores[0].is_ours
    assert sorted(place.rank for place in meet(first, second)) == [0, 1]
    for handler in (first, second):
        handler.shutdown()
    for store in stores:
        store.close()
