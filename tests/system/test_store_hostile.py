"""Hostile and dying peers: other clients notice nothing, memory stays bounded, errors name all."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from tests.conftest import SOON_S
from tests.store_twin.messages import Request, encode_request

from rallypoint import _native
from rallypoint.base.errors import StoreConnectionError, StoreTimeoutError
from rallypoint.store import wire
from rallypoint.store.client import TCPStore
from rallypoint.store.port_holder import holder_of
from rallypoint.store.server import StoreServer
from rallypoint.store.wire import Opcode

TIMEOUT = timedelta(seconds=20)
HELLO = encode_request(Request(Opcode.VALIDATE, number=wire.MAGIC))
SET = encode_request(Request(Opcode.SET, (b"/hostile",), (b"x" * 100,)))
CONNECTIONS = 10_000


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(log_fd=-1) as running:
        yield running


def attempt(kind: int, chance: random.Random, port: int, held: list[socket.socket]) -> None:
    """One hostile connection. What it leaves open goes to `held`."""
    peer = socket.create_connection(("127.0.0.1", port))
    peer.settimeout(5)
    try:
        match kind:
            case 0:  # random
                peer.sendall(chance.randbytes(chance.randrange(1, 200)))
            case 1:  # random behind a valid greeting
                peer.sendall(HELLO + chance.randbytes(chance.randrange(1, 2000)))
            case 2:  # truncated, and gone
                peer.sendall(HELLO + SET[: chance.randrange(1, len(SET))])
            case 3:  # oversized
                peer.sendall(HELLO + b"\x01" + struct.pack("<Q", 1 << chance.randrange(14, 64)))
            case 4:  # half-closed
                peer.sendall(HELLO + SET)
                peer.shutdown(socket.SHUT_WR)
            case 5:  # slow drip: stays open in the middle of a request
                peer.sendall((HELLO + SET)[: chance.randrange(1, len(HELLO + SET))])
                held.append(peer)
                return
            case 6:  # asks for much and reads nothing
                peer.sendall(HELLO + encode_request(Request(Opcode.LIST_KEYS)) * 2000)
                held.append(peer)
                return
            case _:  # connects and says nothing
                held.append(peer)
                return
    except OSError:
        pass  # the server has closed it already
    peer.close()


def test_ten_thousand_hostile_connections_disturb_nobody(server: StoreServer, seed: int) -> None:
    with TCPStore("127.0.0.1", server.port, timeout=TIMEOUT) as store:
        for i in range(100):
            store.set(f"key/{i}", "v" * 50)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        done = threading.Event()
        latencies: list[float] = []

        def work() -> None:
            while not done.is_set():
                started = time.perf_counter()
                store.add("work", 1)
                latencies.append(time.perf_counter() - started)
                time.sleep(0.0005)

        worker = threading.Thread(target=work)
        worker.start()
        chance = random.Random(seed)
        held: list[socket.socket] = []
        for i in range(CONNECTIONS):
            attempt(i % 8, chance, server.port, held)
            if len(held) > 400:
                for peer in held:
                    peer.close()
                held.clear()
        done.set()
        worker.join()
        assert store.add("work", 0) == len(latencies)
        assert store.get("key/7") == b"v" * 50
        assert max(latencies) < SOON_S
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 256 * 1024, f"{grown} KiB more"
        for peer in held:
            peer.close()


def test_a_slow_reader_costs_bounded_memory(server: StoreServer) -> None:
    """It asks 100,000 times for 8 MiB and reads nothing: the server stops reading from it."""
    with TCPStore("127.0.0.1", server.port, timeout=TIMEOUT) as store:
        store.set("big", b"x" * (8 << 20))
        assert store.check(["big"])  # it has arrived
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with socket.create_connection(("127.0.0.1", server.port)) as greedy:
            greedy.sendall(HELLO)
            greedy.setblocking(False)
            request = encode_request(Request(Opcode.GET, (b"/big",))) * 1000
            for _ in range(100):
                try:
                    greedy.send(request)
                except BlockingIOError:
                    break
            assert store.add("n", 1) == 1
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < 64 * 1024, f"{grown} KiB more"
            # When it reads after all, it gets what it asked for.
            greedy.settimeout(20)
            size, seen = 8 + (8 << 20), 0
            while seen < 3 * size:
                seen += len(greedy.recv(1 << 20))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_greeting_in_pieces_is_accepted(server: StoreServer, size: int) -> None:
    """PyTorch's server closes such connections, though TCP may cut anything anywhere."""
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(HELLO[:size])
        time.sleep(0.02)
        peer.sendall(HELLO[size:] + encode_request(Request(Opcode.PING, number=77)))
        peer.settimeout(20)
        assert peer.recv(100) == wire.u32(77)


OPERATIONS: list[tuple[str, str | None, Callable[[TCPStore], object]]] = [
    ("get", "k", lambda store: store.get("k")),
    ("add", "k", lambda store: store.add("k", 1)),
    ("check", "k", lambda store: store.check(["k"])),
    ("compare_set", "k", lambda store: store.compare_set("k", "", "x")),
    ("wait", "k", lambda store: store.wait(["k"])),
    ("delete_key", "k", lambda store: store.delete_key("k")),
    ("num_keys", None, lambda store: store.num_keys()),
    ("list_keys", None, lambda store: store.list_keys()),
    ("multi_get", "k", lambda store: store.multi_get(["k", "l"])),
    ("queue_pop", "k", lambda store: store.queue_pop("k")),
    ("queue_len", "k", lambda store: store.queue_len("k")),
    ("barrier", "k", lambda store: store.barrier("k", 2)),
]


@pytest.fixture
def doomed() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "store", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    yield port, process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize(("name", "key", "call"), OPERATIONS)
def test_a_killed_server_is_named_by_every_operation(
    doomed: tuple[int, subprocess.Popen[str]],
    name: str,
    key: str | None,
    call: Callable[[TCPStore], object],
) -> None:
    port, process = doomed
    with TCPStore("127.0.0.1", port, timeout=TIMEOUT) as store:
        if name in {"wait", "get", "multi_get", "queue_pop", "barrier"}:
            threading.Timer(0.1, process.kill).start()  # while it waits
        else:
            process.kill()
            process.wait()
        started = time.monotonic()
        with pytest.raises(StoreConnectionError) as caught:
            call(store)
        assert time.monotonic() - started < SOON_S
        error = caught.value
        assert (error.endpoint, error.operation, error.key) == (f"127.0.0.1:{port}", name, key)
        assert f"127.0.0.1:{port}" in str(error)
        assert name in str(error)


def test_a_stuck_server_does_not_hold_its_clients() -> None:
    """Stopped, not dead: torch's client hangs for ever in add; ours ends with its timeout."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "store", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    try:
        with TCPStore("127.0.0.1", port, timeout=timedelta(seconds=0.3)) as store:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # until every thread of it stands
            started = time.monotonic()
            with pytest.raises(StoreConnectionError, match=r"add of 'n'.*no answer within 0.3 s"):
                store.add("n", 1)
            assert time.monotonic() - started < SOON_S
            with pytest.raises(StoreConnectionError, match="open the store again"):
                store.add("n", 1)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_client_killed_in_a_wait_leaves_no_waiter(server: StoreServer) -> None:
    script = (
        "import sys; from rallypoint.store.client import TCPStore\n"
        f"store = TCPStore('127.0.0.1', {server.port})\n"
        "print('waits', flush=True)\n"
        "store.queue_pop('q')"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    process.kill()
    process.wait()
    process.stdout.close()
    with TCPStore("127.0.0.1", server.port, timeout=TIMEOUT) as store:
        while server.counters()[0] > 1:
            time.sleep(0.01)
        store.queue_push("q", "for the living")
        assert store.queue_pop("q") == b"for the living"


def test_who_says_nothing_is_closed_after_a_while() -> None:
    machine = _native.StoreMachine()
    silent, polite = machine.open(100.0), machine.open(100.0)
    assert machine.receive(polite, HELLO) is None
    assert machine.late(129.9) == []
    assert machine.late(130.0) == [silent]


def test_out_of_descriptors_the_server_lives_on() -> None:
    """New connections are turned away at once; those that are there work; then there is room."""
    process = subprocess.Popen(
        ["sh", "-c", f"ulimit -n 40; exec {sys.executable} -m rallypoint store --port 0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        port = int(process.stdout.readline().rpartition(":")[2])
        with TCPStore("127.0.0.1", port, timeout=TIMEOUT) as store:
            crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
            assert "raise the limit on open files" in process.stderr.readline()
            assert store.add("n", 1) == 1
            for peer in crowd:
                peer.close()
            with store.clone() as another:
                assert another.add("n", 1) == 2
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_a_port_in_use_names_its_holder(server: StoreServer) -> None:
    with pytest.raises(
        StoreConnectionError, match=rf":{server.port} \(it is in use by process {os.getpid()} \("
    ):
        StoreServer(port=server.port, log_fd=-1)


def test_a_holder_that_is_given_as_text_is_named_in_one_line() -> None:
    program = "import socket\nheld = socket.create_server(('127.0.0.1', 0))\n"
    program += "print(held.getsockname()[1], flush=True)\ninput()\n"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        named = holder_of(int(holder.stdout.readline()))
        holder.kill()
    assert named.startswith(f"process {holder.pid} (") and "\n" not in named
    assert "-c import socket held = socket.create_server" in named


def test_masters_of_one_process_can_share_a_server() -> None:
    first = TCPStore("127.0.0.1", 0, None, True, TIMEOUT, multi_tenant=True)
    second = TCPStore("127.0.0.1", first.port, None, True, TIMEOUT, multi_tenant=True)
    first.set("k", "v")
    assert second.get("k") == b"v"
    first.close()
    assert second.get("k") == b"v"
    second.close()
    with pytest.raises(StoreConnectionError):
        TCPStore("127.0.0.1", first.port, timeout=timedelta(seconds=0.2))


def test_a_missing_server_is_an_error_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(StoreConnectionError, match=f"127.0.0.1:{port} within 0.3 s"):
        TCPStore("127.0.0.1", port, timeout=timedelta(seconds=0.3))
    assert time.monotonic() - started < SOON_S


def test_the_master_says_how_many_came() -> None:
    with pytest.raises(StoreTimeoutError, match="1 of 3 clients joined"):
        TCPStore("127.0.0.1", 0, 3, True, timedelta(seconds=0.3))


def test_a_store_ends_cleanly_and_tells_its_status() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "store", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    with TCPStore("127.0.0.1", port, timeout=TIMEOUT) as store:
        store.set("k", "v")
        store.num_keys()
        os.kill(process.pid, signal.SIGUSR1)
        assert "1 connections, 1 keys" in process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.readline() == "rallypoint store ended\n"
    process.stdout.close()
