"""Nodes that meet through `rallypoint.rendezvous`: in threads, in processes, over every store."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.system.etcd_cluster import Cluster
from tests.system.meetings import Call, Programs, meet, until

from rallypoint.rendezvous import (
    DynamicRendezvousHandler,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeout,
    RendezvousTimeoutError,
    get_rendezvous_handler,
)
from rallypoint.rendezvous.consensus.messages import Ballot
from rallypoint.rendezvous.job.round import Member
from rallypoint.rendezvous.keyvalue.keeper import Claim, JobKeys, Transact, pack
from rallypoint.rendezvous.keyvalue.store_client import StoreClient
from rallypoint.store.client import TCPStore
from rallypoint.store.file import FileStore
from rallypoint.store.local_store import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.server import StoreServer
from rallypoint.store.store import Store

pytestmark = pytest.mark.system

Make = Callable[..., RendezvousHandler]


@pytest.fixture
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens the same store each time, as each node would."""
    with StoreServer() as server:
        shared = HashStore()
        opened: list[Store] = []

        def open_one() -> Store:
            store: Store
            match request.param:
                case "hash":
                    store = shared.clone()
                case "file":
                    store = FileStore(str(tmp_path / "store"))
                case "prefix":
                    store = PrefixStore("inner", TCPStore("127.0.0.1", server.port))
                case _:
                    store = TCPStore("127.0.0.1", server.port)
            opened.append(store)
            return store

        yield open_one
        for store in opened:
            store.close()


@pytest.fixture(params=["store", "c10d"])
def make(
    request: pytest.FixtureRequest, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes handlers of one rendezvous, of either kind; whatever they leave is a failure."""
    if request.param == "c10d":
        monkeypatch.setenv("RALLYPOINT_TOKEN", "secret")
        yield from _making(lambda **how: _c10d(free_port, **how))
    else:
        with StoreServer() as server, TCPStore("127.0.0.1", server.port) as store:
            yield from _making(lambda **how: _over(store, **how))


@pytest.fixture
def make_in(open_store: Callable[[], Store]) -> Iterator[Make]:
    """Makes handlers that meet in a store of each kind."""
    yield from _making(lambda **how: _over(open_store(), **how))


def _making(create: Make) -> Iterator[Make]:
    made: list[RendezvousHandler] = []

    def make_one(**how: Any) -> RendezvousHandler:
        made.append(create(**how))
        return made[-1]

    yield make_one
    for handler in made:
        handler.shutdown()
    until(lambda: all(not each.name.startswith("rendezvous") for each in threading.enumerate()))


def _over(
    store: Store,
    least: int = 2,
    most: int = 3,
    join_s: float = 300,
    last_call_s: float = 0.5,
    run_id: str = "r",
    missed_heartbeats: float = 20,
) -> DynamicRendezvousHandler:
    """With a lease of 30 s: only where a node dies silently is it to be short."""
    timeout = RendezvousTimeout(
        join=timedelta(seconds=join_s), last_call=timedelta(seconds=last_call_s)
    )
    return DynamicRendezvousHandler.from_backend(
        run_id,
        store,
        "any",
        least,
        most,
        timeout=timeout,
        keep_alive_interval=1.5,
        keep_alive_max_attempt=missed_heartbeats,
    )


def _c10d(
    port: int,
    least: int = 2,
    most: int = 3,
    join_s: float = 300,
    last_call_s: float = 1,
    run_id: str = "r",
    **config: object,
) -> RendezvousHandler:
    config |= {"join_timeout": int(join_s), "last_call_timeout": round(last_call_s)}
    config |= {"keep_alive_interval": 1.5, "keep_alive_max_attempt": 20}
    return get_rendezvous_handler(
        RendezvousParameters("c10d", f"127.0.0.1:{port}", run_id, least, most, None, **config)
    )


EVERYDAY = [pytest.param(name, marks=pytest.mark.everyday) for name in ("file", "tcp")]


@pytest.mark.parametrize("open_store", ["hash", "prefix", *EVERYDAY], indirect=True)
def test_every_store_holds_a_rendezvous(make_in: Make) -> None:
    first, second = make_in(), make_in()
    places = meet(first, second)
    assert sorted(place.rank for place in places) == [0, 1]
    assert {place.world_size for place in places} == {2}
    places[0].store.set("who", "me")
    assert places[1].store.get("who") == b"me"
    third = make_in()
    call = Call(third)
    until(lambda: first.num_nodes_waiting() and second.num_nodes_waiting())
    again = [*meet(first, second), call.result()]
    assert [place.rank for place in again[:2]] == [place.rank for place in places]
    assert [place.rank for place in again[2:]] == [2]
    assert not again[0].store.check(["who"])  # nothing of the old round
    third.set_closed()
    until(first.is_closed)
    with pytest.raises(RendezvousClosedError, match="closed"):
        first.next_rendezvous()
    with pytest.raises(RendezvousClosedError, match="closed"):
        make_in().next_rendezvous()


@pytest.mark.everyday
def test_complete_at_once_when_all_are_there(make: Make) -> None:
    handlers = [make(last_call_s=1000) for _ in range(3)]
    places = meet(*handlers)
    assert sorted(place.rank for place in places) == [0, 1, 2]
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0, 0]
    infos = {place.bootstrap_store_info for place in places}
    (info,) = infos  # all were told the same
    assert all(handler.use_agent_store for handler in handlers)
    with TCPStore(info.master_addr, info.master_port) as store:
        assert store.list_keys() == [] or all("rendezvous" in key for key in store.list_keys())


def test_too_few_is_told_with_numbers_and_can_be_tried_again(make: Make) -> None:
    alone = make(join_s=2)
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes joined"):
        alone.next_rendezvous()
    assert not alone.is_closed()
    other = make()
    assert sorted(place.world_size for place in meet(alone, other)) == [2, 2]


def test_one_who_wants_a_new_round_calls_all_back(make: Make) -> None:
    first, second = make(most=2), make(most=2)
    before = meet(first, second)
    call = Call(first)
    until(second.num_nodes_waiting)
    assert call.waits  # until the other one comes as well
    after = [second.next_rendezvous(), call.result()]
    assert [each.rank for each in reversed(after)] == [each.rank for each in before]


def test_closing_is_told_to_those_who_run_wait_and_come_later(make: Make) -> None:
    first, second = make(most=2), make(most=2)
    meet(first, second)
    waiting = Call(make(most=2))
    first.set_closed()
    assert first.is_closed()
    until(second.is_closed)
    with pytest.raises(RendezvousClosedError, match="closed"):
        waiting.result()
    for handler in (first, second, make(most=2)):
        with pytest.raises(RendezvousClosedError, match="closed"):
            handler.next_rendezvous()


@pytest.mark.parametrize("make", ["store"], indirect=True)
def test_shutdown_closes_for_all(make: Make) -> None:
    first, second = make(most=2), make(most=2)
    meet(first, second)
    assert first.shutdown()
    until(second.is_closed)
    assert second.shutdown()


@pytest.mark.parametrize("make", ["store"], indirect=True)
def test_a_handler_that_nobody_holds_any_more_leaves(make: Make) -> None:
    first: Any
    first, second = make(), make()
    meet(first, second)
    third = _over(first._store.clone())  # no fixture holds it
    call = Call(third)
    until(first.num_nodes_waiting)
    meet(first, second)
    call.result()
    del third, call
    until(first.num_nodes_waiting)
    assert [place.world_size for place in meet(first, second)] == [2, 2]


@pytest.fixture
def programs(request: pytest.FixtureRequest, tmp_path: Path, free_port: int) -> Iterator[Programs]:
    with StoreServer() as server:
        where = {
            "tcp": str(server.port),
            "file": str(tmp_path / "store"),
            "c10d": f"127.0.0.1:{free_port}",
        }[request.param]
        programs = Programs(tmp_path, request.param, where, heartbeat_s=0.3)
        yield programs
        programs.kill_all()


@pytest.mark.parametrize(
    ("programs", "victim"), [("tcp", "a"), ("file", "c"), ("c10d", "a")], indirect=["programs"]
)
def test_a_killed_process_is_missed_and_can_be_replaced(programs: Programs, victim: str) -> None:
    programs.start("a")
    programs.start("b")
    programs.start("c")
    programs.wait_for("a", "b", "c")
    programs.send(victim, signal.SIGKILL)
    left = [name for name in "abc" if name != victim]
    programs.wait_for(*left)
    if victim != "a" or programs._words[0] != "c10d":
        programs.start("d")
        programs.wait_for(*left, "d")
        left.append("d")
    programs.finish(left)


@pytest.mark.parametrize("programs", ["tcp", "c10d"], indirect=True)
def test_a_process_that_was_suspended_is_a_newcomer(programs: Programs) -> None:
    for name in "abc":
        programs.start(name)
    programs.wait_for("a", "b", "c")
    programs.send("c", signal.SIGSTOP)
    programs.wait_for("a", "b")
    programs.send("c", signal.SIGCONT)
    programs.wait_for("a", "b", "c")
    programs.finish(["a", "b", "c"])


def test_what_cannot_be_read_or_reached_is_said(tmp_path: Path) -> None:
    store = HashStore()
    store.set("rallypoint.rendezvous/r/state", "what is this")
    with pytest.raises(RendezvousStateError, match="cannot be read"):
        _over(store, least=1, most=1).next_rendezvous()
    with StoreServer() as server:
        client = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=2))
        handler = _over(client, least=1, most=1)
        assert handler.next_rendezvous().world_size == 1
    with pytest.raises(RendezvousConnectionError, match="cannot reach its store"):
        handler.is_closed()
    with pytest.raises(RendezvousConnectionError, match="cannot reach its store"):
        handler.next_rendezvous()
    assert not handler.shutdown()
    client.close()


@pytest.mark.parametrize("open_store", ["tcp"], indirect=True)
def test_others_go_on_with_the_next_round_when_all_have_left(make_in: Make) -> None:
    handlers: list[Any] = [make_in(missed_heartbeats=2), make_in(missed_heartbeats=2)]
    before = meet(*handlers)
    before[0].store.set("k", "v")
    for handler in handlers:  # as when nobody holds the handler any more
        handler._node.end()
        assert handler._node.join(60)
    after = meet(make_in(missed_heartbeats=2), make_in(missed_heartbeats=2))
    assert {place.world_size for place in after} == {2}
    assert after[0].store.prefix != before[0].store.prefix
    assert not after[0].store.check(["k"])


@pytest.mark.seldom
def test_whoever_listens_where_a_dead_node_did_is_no_hindrance(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLYPOINT_TOKEN", "of another rendezvous")
    other = _c10d(free_port, least=1)
    other.next_rendezvous()
    dead = Member(key="d", host="h", local_world_size=1, address="127.0.0.1", port=free_port)
    claim = Claim(ballot=Ballot(1, "d"), leader=dead, host="d", lease="")
    store, name = HashStore(), JobKeys("r", 0).claim
    client = StoreClient(store, "rallypoint.rendezvous/r/state")
    client.transact(Transact(revisions={}, puts={name: pack(claim)}))
    hasty = _over(store, least=1, most=1, join_s=2, missed_heartbeats=2)
    with pytest.raises(RendezvousTimeoutError, match=f":{free_port}. coordinates, but does not"):
        hasty.next_rendezvous()
    handler = _over(store, least=1, most=1, missed_heartbeats=2)
    assert handler.next_rendezvous().world_size == 1
    for each in (hasty, handler, other):
        each.shutdown()


@pytest.mark.everyday
def test_c10d_says_why_a_node_is_not_let_in(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLYPOINT_TOKEN", "secret")
    first = _c10d(free_port)
    call = Call(first)
    wrong_name = _c10d(free_port, run_id="other")
    with pytest.raises(RendezvousConnectionError, match="the job is 'r', not 'other'"):
        wrong_name.next_rendezvous()
    wrong_token = _c10d(free_port, token="guess")
    with pytest.raises(RendezvousConnectionError, match="a different token"):
        wrong_token.next_rendezvous()
    second = _c10d(free_port)
    meet(second)
    call.result()
    for handler in (wrong_name, wrong_token, first, second):
        handler.shutdown()


def test_c10d_meets_in_a_file_too(tmp_path: Path) -> None:
    def make() -> RendezvousHandler:
        return get_rendezvous_handler(
            RendezvousParameters(
                "c10d", str(tmp_path / "store"), "r", 2, 2, store_type="file", join_timeout=20
            )
        )

    first, second = make(), make()
    assert sorted(place.rank for place in meet(first, second)) == [0, 1]
    first.shutdown()
    second.shutdown()


@pytest.mark.everyday
def test_static_nodes_meet_by_rank_again_and_again(free_port: int) -> None:
    def make(rank: int, patience_s: int = 300) -> RendezvousHandler:
        return get_rendezvous_handler(
            RendezvousParameters(
                "static", f"127.0.0.1:{free_port}", "r", 2, 2, rank=rank, timeout=patience_s
            )
        )

    first, second = make(0), make(1)
    places = meet(first, second)
    assert [place.rank for place in places] == [0, 1]
    places[0].store.set("k", "v")
    assert places[1].store.get("k") == b"v"
    assert places[0].bootstrap_store_info.master_port == free_port
    second = make(1)  # as a process that was started again
    again = meet(first, second)
    assert not again[1].store.check(["k"])
    lonely = make(1, patience_s=1)
    with pytest.raises(RendezvousTimeoutError, match="missing rank 0"):
        lonely.next_rendezvous()
    assert not second.is_closed()
    first.set_closed()
    until(second.is_closed)
    with pytest.raises(RendezvousClosedError):
        second.next_rendezvous()
    assert [first.num_nodes_waiting(), second.shutdown(), first.shutdown()] == [0, True, True]
    lonely.shutdown()


def test_programs_meet_at_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_TOKEN", "secret")
    cluster = Cluster(tmp_path, 1)
    try:
        with cluster.client() as client:
            client.read("ready/")
        endpoint = ",".join(f"{host}:{port}" for host, port in cluster.endpoints)

        def make() -> RendezvousHandler:
            return get_rendezvous_handler(
                RendezvousParameters("etcd", endpoint, "r", 2, 3, last_call_timeout=1)
            )

        first, second = make(), make()
        assert sorted(place.rank for place in meet(first, second)) == [0, 1]
        late = make()
        call = Call(late)
        until(lambda: first.num_nodes_waiting() and second.num_nodes_waiting())
        assert {place.world_size for place in [*meet(first, second), call.result()]} == {3}
        first.set_closed()
        until(lambda: second.is_closed() and late.is_closed())
        assert [handler.shutdown() for handler in (late, second, first)] == [True] * 3
    finally:
        cluster.close()
