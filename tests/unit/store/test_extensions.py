"""What only our server can do: tokens, allow-lists, watches, ephemeral keys, rounds."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
from tests.conftest import need_ipv6
from tests.store_twin.messages import Request, encode_request
from tests.system.everyday import wait_until

from rallypoint import _native
from rallypoint.base.errors import (
    InvalidArgumentError,
    StoreConnectionError,
    StoreError,
    StoreFencedError,
)
from rallypoint.store import wire
from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer
from rallypoint.store.session import KeyEvent, Watch

TIMEOUT = timedelta(seconds=60)


def client(server: StoreServer, token: bytes | None = None) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, timeout=TIMEOUT, token=token)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(log_fd=-1) as running:
        yield running


def gather(watch: Watch, count: int) -> list[KeyEvent]:
    events: list[KeyEvent] = []
    while len(events) < count:
        more = watch.events(60.0)
        assert more, f"only {events}"
        events += more
    return events


def test_a_watch_tells_what_is_there_and_what_changes(server: StoreServer) -> None:
    with client(server) as store:
        store.set("w/old", "1")
        store.set("other", "x")
        watch = store.watch("w/")
        assert gather(watch, 1) == [KeyEvent("w/old", b"1")]
        store.set("w/new", "2")
        store.set("other", "y")
        store.add("w/n", 3)
        store.delete_key("w/old")
        assert gather(watch, 3) == [
            KeyEvent("w/new", b"2"),
            KeyEvent("w/n", b"3"),
            KeyEvent("w/old", None),
        ]
        assert watch.events(0.0) == []
        store.set("w/big", "x" * 3_000_000)
        assert select.select([watch], [], [], 60)[0]
        assert gather(watch, 1)[0].value == b"x" * 3_000_000
        watch.close()


def test_ephemeral_keys_end_with_their_connection(server: StoreServer) -> None:
    with client(server) as store:
        watch = store.watch("alive/")
        other = client(server)
        other.set_ephemeral("alive/1", "here")
        other.set_ephemeral("alive/2", "here")
        assert [e.key for e in gather(watch, 2)] == ["alive/1", "alive/2"]
        store.set("alive/2", "kept")
        assert gather(watch, 1) == [KeyEvent("alive/2", b"kept")]
        other.close()
        assert gather(watch, 1) == [KeyEvent("alive/1", None)]
        assert store.list_keys() == ["alive/2"]
        watch.close()


def test_a_store_in_a_ring_of_objects_is_let_go_of_quietly(server: StoreServer) -> None:
    """A traceback can make such a ring; then the order in which its parts end is any."""
    store = TCPStore("127.0.0.1", server.port)
    store.set_ephemeral("here", "")
    ring: list[object] = [store]
    ring.append(ring)
    del store, ring
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is raised in a finalizer fails the test
        gc.collect()
    with TCPStore("127.0.0.1", server.port) as look:
        wait_until(lambda: not look.check(["here"]))


def test_a_new_round_ends_the_old_one(server: StoreServer) -> None:
    with client(server) as old, client(server) as new, client(server) as outside:
        outside.set("k", "outside")
        old.enter("job", 1)
        old.set("k", "old")
        watch = old.watch("")
        assert gather(watch, 1) == [KeyEvent("k", b"old")]
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                old.get("never")
            except StoreFencedError as error:
                failures.append(error)

        _, _, requests = server.counters()
        waiter = threading.Thread(target=wait)
        waiter.start()
        # Until it waits; too early would only be another path to the same error.
        wait_until(lambda: server.counters()[2] > requests)
        new.enter("job", 2)
        waiter.join(60)
        assert "round 1 of '/job' ended when round 2 began" in str(failures[0])
        assert not new.check(["k"])
        old.set("k", "stale")  # no reply; the next operation tells
        with pytest.raises(StoreFencedError, match=r"get of 'k'.*join the new round"):
            old.get("k")
        with pytest.raises(StoreFencedError):
            watch.events(60.0)
        with pytest.raises(StoreFencedError):
            old.enter("job", 1)
        old.enter("job", 2)
        old.set("k", "joined")
        assert new.get("k") == b"joined"
        assert new.clone().get("k") == b"joined"
        assert outside.get("k") == b"outside"


def test_a_token_opens_the_store_and_nothing_else_does() -> None:
    read, write = os.pipe()
    with StoreServer(token=b"secret", log_fd=write) as server:
        with client(server, token=b"secret") as store:
            store.set("k", "v")
            assert store.clone().get("k") == b"v"
        with pytest.raises(StoreConnectionError, match="requires a token"):
            client(server)
        with pytest.raises(StoreConnectionError, match="has a different token"):
            client(server, token=b"wrong")
        assert server.counters()[2] > 0
        requests = server.counters()[2]
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(encode_request(Request(wire.Opcode.NUM_KEYS)) * 10)
            raw.settimeout(60)
            assert raw.recv(100) == wire.u32(wire.TOKEN_REFUSED)
            assert raw.recv(100) == b""
        assert server.counters()[2] == requests
    lines = os.read(read, 65536).decode().splitlines()
    os.close(read)
    os.close(write)
    assert len(lines) == 1  # once per address
    assert "127.0.0.1" in lines[0]
    assert "token" in lines[0]


def test_a_client_with_a_token_refuses_an_impostor() -> None:
    """Somebody without the token answers on the port, and must not get our keys."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"n" * 32)
                connection.recv(100)
                connection.sendall(b"p" * 32)
                connection.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(StoreConnectionError, match="could not prove that it knows the token"):
            TCPStore("127.0.0.1", impostor.getsockname()[1], timeout=TIMEOUT, token=b"secret")


def test_the_native_hmac_is_the_librarys() -> None:
    import hmac

    for size in (0, 1, 55, 56, 63, 64, 65, 200):
        key, message = b"k" * size, bytes(range(size))
        assert _native.hmac_sha256(key, message) == hmac.digest(key, message, "sha256")


def test_only_listed_hosts_and_loopback_are_let_in(server: StoreServer) -> None:
    server.allow(["10.1.2.3", "fe80::1"])
    with client(server) as store:
        store.set("k", "v")
    with pytest.raises(InvalidArgumentError, match="numeric"):
        server.allow(["node-7.example"])


@pytest.mark.needs_torch
def test_what_our_server_adds_is_refused_in_words_elsewhere() -> None:
    import torch.distributed as torch_dist

    master = torch_dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT)
    with TCPStore("127.0.0.1", master.port, timeout=TIMEOUT) as store:
        for call in (lambda: store.watch("k"), lambda: store.enter("k", 1)):
            with pytest.raises(StoreError, match="needs a Rallypoint server"):
                call()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::", "0.0.0.0", "localhost"])
def test_every_kind_of_address(host: str) -> None:
    if ":" in host:
        need_ipv6()
    with StoreServer(host, log_fd=-1) as server:
        reach = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(host, host)
        with TCPStore(reach, server.port, timeout=TIMEOUT) as store:
            assert store.add("n", 1) == 1


def test_a_forked_child_lets_go_of_server_and_clients() -> None:
    """As DataLoader's workers do: the child outlives the parent's server and does not hold it."""
    server = StoreServer(log_fd=-1)
    store = client(server)
    store.set("k", "v")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.get("k")
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
            server.close()
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(read, 100) == b"StoreConnectionError"
        assert store.get("k") == b"v"
        store.close()
        server.close()
        with StoreServer(port=server.port, log_fd=-1) as again:
            assert again.port == server.port
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
