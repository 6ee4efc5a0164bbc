"""Hostile and dying peers: other clients notice nothing, memory stays bounded, errors name all."""

from __future__ import annotations

import contextlib
import os
import random
import re
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
from pathlib import Path

import pytest
from tests.conftest import SOON_S
from tests.store_twin.messages import Request, encode_request
from tests.system.everyday import wait_until

from rallypoint.base.errors import StoreConnectionError
from rallypoint.store import wire
from rallypoint.store.client import TCPStore
from rallypoint.store.port_holder import holder_of
from rallypoint.store.server import StoreServer
from rallypoint.store.wire import Opcode

pytestmark = pytest.mark.system

TIMEOUT = timedelta(seconds=60)
HELLO = encode_request(Request(Opcode.VALIDATE, number=wire.MAGIC))
SET = encode_request(Request(Opcode.SET, (b"/hostile",), (b"x" * 100,)))
GREETING = 2  # requests, with which our client begins
CONNECTIONS = 10_000


class Server:
    """`rallypoint store` in a process of its own; `before` goes before its command."""

    def __init__(self, *before: str) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "rallypoint", "store", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._line().rpartition(":")[2])

    def counters(self) -> tuple[int, ...]:
        """How many connections, keys and requests there are."""
        self.process.send_signal(signal.SIGUSR1)
        found = re.search(r"(\d+) connections, (\d+) keys, (\d+) requests", self._line())
        assert found is not None
        return tuple(map(int, found.groups()))

    def most_kib(self) -> int:
        """The most memory that it has had at one time."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def own() -> Iterator[Server]:
    with Server() as running:
        yield running


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


@pytest.mark.everyday
def test_a_slow_reader_costs_bounded_memory(own: Server) -> None:
    """It asks 100,000 times for 8 MiB and reads nothing: the server stops reading from it."""
    with TCPStore("127.0.0.1", own.port, timeout=TIMEOUT) as store:
        store.set("big", b"x" * (8 << 20))
        assert store.check(["big"])  # it has arrived
        before = own.most_kib()
        with socket.create_connection(("127.0.0.1", own.port)) as greedy:
            greedy.sendall(HELLO)
            greedy.setblocking(False)
            requests = encode_request(Request(Opcode.GET, (b"/big",))) * 100_000
            with contextlib.suppress(BlockingIOError):
                while requests:
                    requests = requests[greedy.send(requests) :]
            # When it reads after all, it gets what it asked for.
            greedy.settimeout(60)
            size, seen = 8 + (8 << 20), 0
            while seen < 3 * size:
                more = greedy.recv(1 << 20)
                assert more, "the server closed the connection"
                seen += len(more)
            assert store.add("n", 1) == 1
            grown = own.most_kib() - before
            assert grown < 64 * 1024, f"{grown} KiB more"


WAITING: dict[str, Callable[[TCPStore], object]] = {
    "get": lambda store: store.get("k"),
    "wait": lambda store: store.wait(["k"]),
    "multi_get": lambda store: store.multi_get(["k", "l"]),
    "queue_pop": lambda store: store.queue_pop("k"),
    "barrier": lambda store: store.barrier("b", 2),  # its count is a key, which others would find
}
OTHERS: dict[str, Callable[[TCPStore], object]] = {
    "add": lambda store: store.add("k", 1),
    "check": lambda store: store.check(["k"]),
    "compare_set": lambda store: store.compare_set("k", "", "x"),
    "delete_key": lambda store: store.delete_key("k"),
    "num_keys": lambda store: store.num_keys(),
    "list_keys": lambda store: store.list_keys(),
    "queue_len": lambda store: store.queue_len("k"),
}


@pytest.mark.everyday
def test_a_killed_server_is_named_by_every_operation(own: Server) -> None:
    errors: dict[str, StoreConnectionError] = {}

    def fail(name: str, store: TCPStore) -> None:
        try:
            (WAITING | OTHERS)[name](store)
        except StoreConnectionError as error:
            errors[name] = error

    stores = {name: TCPStore("127.0.0.1", own.port, timeout=TIMEOUT) for name in WAITING | OTHERS}
    threads = [threading.Thread(target=fail, args=(name, stores[name])) for name in WAITING]
    for thread in threads:
        thread.start()
    requests = GREETING * len(stores) + len(WAITING)
    wait_until(lambda: own.counters()[2] == requests)  # until all of them wait
    own.process.kill()
    own.process.wait()
    for name in OTHERS:
        fail(name, stores[name])
    for thread in threads:
        thread.join(60)
    assert errors.keys() == stores.keys()
    for name, error in errors.items():
        key = {"num_keys": None, "list_keys": None, "barrier": "b"}.get(name, "k")
        endpoint = f"127.0.0.1:{own.port}"
        assert (error.endpoint, error.operation, error.key) == (endpoint, name, key)
        assert endpoint in str(error)
        assert name in str(error)
    for store in stores.values():
        store.close()


@pytest.mark.everyday
def test_a_stuck_server_does_not_hold_its_clients(own: Server) -> None:
    """Stopped, not dead: torch's client hangs for ever in add; ours ends with its timeout."""
    with TCPStore("127.0.0.1", own.port, timeout=TIMEOUT) as store:
        store.set_timeout(timedelta(seconds=0.3))
        own.process.send_signal(signal.SIGSTOP)
        os.waitpid(own.process.pid, os.WUNTRACED)  # until every thread of it stands
        with pytest.raises(StoreConnectionError, match=r"add of 'n'.*no answer within 0.3 s"):
            store.add("n", 1)
        with pytest.raises(StoreConnectionError, match="open the store again"):
            store.add("n", 1)


@pytest.mark.everyday
def test_a_client_killed_in_a_wait_leaves_no_waiter(server: StoreServer) -> None:
    script = (
        "from rallypoint.store.client import TCPStore\n"
        f"TCPStore('127.0.0.1', {server.port}).queue_pop('q')"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_until(lambda: server.counters()[2] == GREETING + 1)
        process.kill()
    wait_until(lambda: server.counters()[0] == 0)
    with TCPStore("127.0.0.1", server.port, timeout=TIMEOUT) as store:
        store.queue_push("q", "for the living")
        assert store.queue_pop("q") == b"for the living"


@pytest.mark.everyday
def test_out_of_descriptors_the_server_lives_on() -> None:
    """New connections are turned away at once; those that are there work; then there is room."""
    with (
        Server("sh", "-c", 'ulimit -n 40; exec "$0" "$@"') as own,
        TCPStore("127.0.0.1", own.port, timeout=TIMEOUT) as store,
    ):
        crowd = [socket.create_connection(("127.0.0.1", own.port)) for _ in range(100)]
        assert own.process.stderr is not None
        assert "raise the limit on open files" in own.process.stderr.readline()
        assert store.add("n", 1) == 1
        for peer in crowd:
            peer.close()
        with store.clone() as another:
            assert another.add("n", 1) == 2


@pytest.mark.everyday
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


@pytest.mark.everyday
def test_a_store_ends_cleanly_and_tells_its_status(own: Server) -> None:
    with TCPStore("127.0.0.1", own.port, timeout=TIMEOUT) as store:
        store.set("k", "v")
        store.num_keys()
        wait_until(lambda: own.counters()[:2] == (1, 1))
        own.process.terminate()
        assert own.process.wait(60) == 0
        assert own.process.stdout is not None
        assert own.process.stdout.readline() == "rallypoint store ended\n"
