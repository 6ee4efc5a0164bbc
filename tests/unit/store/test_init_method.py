"""Every init method opens a store; a wait for ranks names those that are missing."""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from rallypoint.base.errors import InvalidArgumentError, PeerLostError, StoreTimeoutError
from rallypoint.store import init_method
from rallypoint.store.client import TCPStore
from rallypoint.store.init_method import (
    Presence,
    await_ranks,
    missing_ranks,
    open_store,
    say_here,
)
from rallypoint.store.local_store import HashStore
from rallypoint.store.server import StoreServer

TIMEOUT = timedelta(seconds=60)


def test_env_means_the_launchers_store() -> None:
    with StoreServer(log_fd=-1) as server:
        environ = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        opened = open_store(timeout=TIMEOUT, environ=environ)
        assert (opened.rank, opened.world_size) == (0, 2)
        second = open_store(rank=1, timeout=TIMEOUT, environ=environ)
        assert second.rank == 1
        opened.store.set("k", "v")
        assert second.store.get("k") == b"v"
        opened.store.close()
        second.store.close()


def test_tcp_rank_0_serves() -> None:
    first = open_store("tcp://127.0.0.1:0?rank=0&world_size=2", timeout=TIMEOUT, environ={})
    assert isinstance(first.store, TCPStore)
    url = f"tcp://127.0.0.1:{first.store.port}"
    second = open_store(url, rank=1, world_size=2, timeout=TIMEOUT, environ={})
    first.store.set("k", "v")
    assert second.store.get("k") == b"v"
    second.store.close()
    first.store.close()


def test_file_is_shared_and_removed(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    environ = {"TORCHELASTIC_RUN_ID": "run"}
    stores = [
        open_store(url, rank=r, world_size=2, timeout=TIMEOUT, environ=environ).store
        for r in range(2)
    ]
    stores[0].set("k", "v")
    assert stores[1].get("k") == b"v"
    for store in stores:
        store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ftp://x", "unknown"),
        ("tcp://127.0.0.1:1", "rank and world_size"),
        ("tcp://127.0.0.1?rank=0&world_size=1", "needs a host and a port"),
        ("file://?rank=0&world_size=1", "needs a path"),
        ("tcp://127.0.0.1:1?rank=one&world_size=1", "not an integer"),
        ("env://", "RANK"),
    ],
)
def test_what_is_wrong_is_named(method: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        open_store(method, timeout=TIMEOUT, environ={})


def test_missing_ranks_are_named_once_by_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPORT_EVERY", "_CHECK_EVERY"):
        monkeypatch.setattr(init_method, name, timedelta(milliseconds=20))
    monkeypatch.setattr(
        init_method,
        "to_stderr",
        lambda line: lines.put((threading.current_thread().name, line)),
    )
    store = HashStore(TIMEOUT)
    say_here(store, Presence(store, "init", range(4)).key(3))  # so that rank 1 never misses it
    lines: queue.Queue[tuple[str, str]] = queue.Queue()

    def start(rank: int) -> threading.Thread:
        thread = threading.Thread(
            target=await_ranks,
            name=f"rank {rank}",
            args=(store.clone(), "init"),
            kwargs={"rank": rank, "world_size": 4, "timeout": TIMEOUT},
        )
        thread.start()
        return thread

    def expect(rank: int, words: str) -> None:
        reporter, line = lines.get(timeout=60)
        assert reporter == f"rank {rank}"
        assert words in line

    threads = [start(1)]
    expect(1, "missing: 0, 2")
    threads.append(start(3))
    for _ in range(5):
        expect(1, "missing: 0, 2")
    threads += [start(2), start(0)]
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("is_ours", [True, False])
def test_rank_0_answers_what_all_say(is_ours: bool) -> None:
    """The keys that say who is there have no value, on which fresh_round depends."""
    with StoreServer(log_fd=-1) as server:
        shared = HashStore(TIMEOUT)

        def meet(rank: int) -> None:
            with TCPStore("127.0.0.1", server.port, timeout=TIMEOUT) as own:
                answers[rank] = await_ranks(
                    own if is_ours else shared.clone(),
                    "init",
                    rank=rank,
                    world_size=3,
                    timeout=TIMEOUT,
                    says=f"rank {rank}",
                    answer=lambda said: f"lost and found: {', '.join(said)}" if rank == 0 else "",
                )
                all_there.wait(60)

        answers: dict[int, str] = {}
        all_there = threading.Barrier(4)
        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        all_there.wait(60)
        for thread in threads:
            thread.join(60)
        assert set(answers.values()) == {"lost and found: rank 0, rank 1, rank 2"}
        assert is_ours or shared.get("init/1") == b""


def test_none_is_missing_if_the_last_has_just_come() -> None:
    assert missing_ranks({0, 2}, range(4)) == "2 of 4 ranks; missing: 1, 3"
    assert missing_ranks({0, 1}, (5, 7)) == "the last of 2 ranks, which has just joined"


def test_ranks_that_never_come_are_named_in_the_error() -> None:
    with pytest.raises(StoreTimeoutError, match="1 of 2 ranks; missing: 1"):
        await_ranks(
            HashStore(TIMEOUT), "init", rank=0, world_size=2, timeout=timedelta(seconds=0.1)
        )


def test_a_rank_that_ends_as_it_says_that_it_has_come_is_missed() -> None:
    """Its key went with its connection, and the one that stays was never set."""
    with (
        StoreServer(log_fd=-1) as server,
        TCPStore("127.0.0.1", server.port, timeout=TIMEOUT) as store,
    ):
        presence = Presence(store, "init", (4, 5))
        say_here(store, presence.key(0))
        with TCPStore("127.0.0.1", server.port, timeout=TIMEOUT) as other:
            other.set_ephemeral(presence.key(1), "")
            presence.check_all()  # all have come
        with pytest.raises(PeerLostError, match="rank 5 ended or gave up") as caught:
            presence.wait(["never"], time.monotonic() + TIMEOUT.total_seconds())
        assert caught.value.rank == 5
