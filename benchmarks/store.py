"""Is the store faster and smaller than PyTorch's? Ours (server and client) against torch's TCPStore
(server and client), each server in a process of its own, measured in turn on this machine. Rows
that say "wire" drive both servers with the same bytes over plain sockets. A table on screen, and
benchmarks/results/store.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import need, print_table, save

from rallypoint.store import wire
from rallypoint.store.wire import Opcode, pack_key, pack_number, pack_value

KINDS = ("ours", "torch")
TIMEOUT = "datetime.timedelta(seconds=60)"
OPEN = {
    "ours": "from rallypoint.store.client import TCPStore\n",
    "torch": "from torch.distributed import TCPStore\n",
}
SERVE = {
    "ours": """
from rallypoint.store.server import StoreServer
server = StoreServer(log_fd=-1)
print(server.port, flush=True)
sys.stdin.read()
""",
    "torch": """
import datetime
from torch.distributed import TCPStore
server = TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=60))
print(server.port, flush=True)
sys.stdin.read()
""",
}
CLIENT = """
import datetime, sys, time
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, {timeout})
store.set("k", "v")
store.add("n", 0)
print("ready", flush=True)
for line in sys.stdin:
    name, count = line.split()
    call = dict(get=lambda: store.get("k"), add=lambda: store.add("n", 1))[name]
    times = []
    for _ in range(int(count)):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    print(*times, flush=True)
"""
HELLO = struct.pack("<BI", Opcode.VALIDATE, wire.MAGIC)
PING = struct.pack("<BI", Opcode.PING, 4242)
NUM_KEYS = bytes([Opcode.NUM_KEYS])


@dataclass(frozen=True, slots=True)
class Row:
    """One question: what was measured, in which unit, and whether less is better."""

    name: str
    unit: str
    less_is_better: bool
    measure: Callable[[str], list[float]]


class Process:
    """A child that serves or asks, by lines."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys\n" + code, *arguments],
            env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},  # see connections()
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.first = self.read()

    def read(self) -> str:
        """Return the next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a child of the benchmark ended early")
        return line.strip()

    def ask(self, line: str) -> str:
        """Send a line and return the next one."""
        self.tell(line)
        return self.read()

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def rss_kib(self) -> int:
        """Return the resident memory."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1])
        return 0

    def end(self) -> None:
        """Kill it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()


@contextlib.contextmanager
def server(kind: str) -> Iterator[tuple[Process, int]]:
    process = Process(SERVE[kind])
    try:
        yield process, int(process.first)
    finally:
        process.end()


@contextlib.contextmanager
def client(kind: str, port: int) -> Iterator[Process]:
    process = Process(OPEN[kind] + CLIENT.format(timeout=TIMEOUT), str(port))
    try:
        yield process
    finally:
        process.end()


def raw(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(HELLO + PING)
    receive(sock, 4)
    return sock


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise SystemExit("the server closed the benchmark's connection")
        data += more
    return data


def set_requests(start: int, count: int) -> bytes:
    return b"".join(
        bytes([Opcode.SET]) + pack_key(name := f"key-{i:012}") + pack_value(name, b"v" * 32)
        for i in range(start, start + count)
    )


def latencies(rounds: int, count: int) -> Iterator[dict[tuple[str, str], list[float]]]:
    """Clients and servers of both kinds, asked in turn, so that all see the same weather."""
    times: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        ports = {kind: stack.enter_context(server(kind))[1] for kind in KINDS}
        clients = {
            "ours": stack.enter_context(client("ours", ports["ours"])),
            "torch": stack.enter_context(client("torch", ports["torch"])),
            "torch's client, our server": stack.enter_context(client("torch", ports["ours"])),
        }
        for _ in range(rounds):
            for name, asked in clients.items():
                for operation in ("get", "add"):
                    asked.ask(f"{operation} 20")  # wake caches and clock
                    found = asked.ask(f"{operation} {count}").split()
                    times.setdefault((name, operation), []).append(
                        1e6 * statistics.median(map(float, found))
                    )
    yield times


def throughput(kind: str, processes: int = 8, count: int = 4000) -> list[float]:
    with contextlib.ExitStack() as stack:
        _, port = stack.enter_context(server(kind))
        clients = [stack.enter_context(client(kind, port)) for _ in range(processes)]
        begin = time.perf_counter()
        for asked in clients:
            asked.tell(f"add {count}")
        for asked in clients:
            asked.read()
        return [processes * count / (time.perf_counter() - begin)]


def pipelined_set(kind: str, count: int = 100_000) -> list[float]:
    requests = set_requests(0, count) + NUM_KEYS
    with server(kind) as (_, port), raw(port) as sock:
        begin = time.perf_counter()
        sock.sendall(requests)
        keys = struct.unpack("<q", receive(sock, 8))[0]
        took = time.perf_counter() - begin
        assert keys >= count
        return [count / took]


def connections(kind: str, count: int = 1500, limit_s: float = 6.0) -> tuple[float, float]:
    """Connections per second, one after the other, and the median time of one.

    torch's server asks for the peer's name each time, and now and then waits seconds for a lost
    answer; the median does not see that, the rate does.
    """
    with server(kind) as (_, port):
        times: list[float] = []
        while len(times) < count and sum(times) < limit_s:
            begin = time.perf_counter()
            raw(port).close()
            times.append(time.perf_counter() - begin)
        return len(times) / sum(times), 1e6 * statistics.median(times)


def memory_at_start(kind: str) -> list[float]:
    with server(kind) as (process, port), raw(port):
        return [process.rss_kib() / 1024]


def memory_of_keys(kind: str, count: int = 100_000) -> list[float]:
    with server(kind) as (process, port), raw(port) as sock:
        before = process.rss_kib()
        for start in range(0, count, 1000):
            sock.sendall(set_requests(start, 1000))
        sock.sendall(NUM_KEYS)
        receive(sock, 8)
        return [(process.rss_kib() - before) / 1024]


def idle_connections(kind: str, count: int, limit_s: float = 45.0) -> tuple[float, float]:
    """Memory per idle connection in KiB, and the latency of an add among them.

    Fewer than `count` where they take longer than `limit_s` to open (see `connections`).
    """
    with server(kind) as (process, port):
        first = raw(port)
        before = process.rss_kib()
        deadline = time.monotonic() + limit_s
        held: list[socket.socket] = []
        while len(held) < count and time.monotonic() < deadline:
            held.append(raw(port))
        if len(held) < count:
            print(f"{kind}: only {len(held)} connections opened in {limit_s:g} s", flush=True)
        grown_kib = (process.rss_kib() - before) / len(held)
        request = bytes([Opcode.ADD]) + pack_key("n") + pack_number("add", 1)
        times = []
        for _ in range(2000):
            begin = time.perf_counter()
            first.sendall(request)
            receive(first, 8)
            times.append(time.perf_counter() - begin)
        for sock in (first, *held):
            sock.close()
        return grown_kib, 1e6 * statistics.median(times)


def record(
    rows: list[dict[str, Any]], name: str, unit: str, less: bool, values: dict[str, list[float]]
) -> None:
    ours, torch = (statistics.median(values[kind]) for kind in KINDS)
    factor = torch / ours if less else ours / torch
    rows.append(
        {
            "row": name, "unit": unit, "ours": ours, "torch": torch, "times_better": factor,
            "samples": values,
        }
    )  # fmt: skip
    print(f"{name}: {ours:.4g} {unit}, torch {torch:.4g} {unit}: {factor:.2f} times", flush=True)


def in_turn(repeats: int, measure: Callable[[str], list[float]]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for i in range(repeats):
        for kind in KINDS if i % 2 == 0 else reversed(KINDS):
            values[kind] += measure(kind)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--idle", type=int, default=10_000, help="idle connections")
    options = parser.parse_args()
    if not need("torch", "there is nothing to compare with (pip install torch)"):
        return
    rows: list[dict[str, Any]] = []
    for times in latencies(rounds=8 * options.repeats, count=150):
        for operation in ("get", "add"):
            both = {kind: times[kind, operation] for kind in KINDS}
            record(rows, f"{operation}, median latency", "us", True, both)
            both["ours"] = times["torch's client, our server", operation]
            record(rows, f"{operation}, torch's client with both", "us", True, both)
    plain = (
        Row("add from 8 processes", "1/s", False, throughput),
        Row("SET pipelined (wire)", "1/s", False, pipelined_set),
        Row("memory of the server's process at start", "MiB", True, memory_at_start),
        Row("memory of 100,000 keys", "MiB", True, memory_of_keys),
    )
    for row in plain:
        record(rows, row.name, row.unit, row.less_is_better, in_turn(options.repeats, row.measure))
    opened = {kind: [connections(kind) for _ in range(options.repeats)] for kind in KINDS}
    for index, (name, unit) in enumerate(
        (("connections (wire)", "1/s"), ("connect, median", "us"))
    ):
        column = {kind: [pair[index] for pair in opened[kind]] for kind in KINDS}
        record(rows, name, unit, index == 1, column)
    values: list[dict[str, list[float]]] = [{kind: [] for kind in KINDS} for _ in range(2)]
    for kind in KINDS * 2:
        for column, number in zip(values, idle_connections(kind, options.idle), strict=True):
            column[kind].append(number)
    record(rows, f"memory of each of {options.idle} idle connections", "KiB", True, values[0])
    record(rows, f"add among {options.idle} idle connections (wire)", "us", True, values[1])
    print()
    print_table(
        ("", "ours", "torch", "unit", "times better"),
        [
            (
                r["row"],
                f"{r['ours']:.4g}",
                f"{r['torch']:.4g}",
                r["unit"],
                f"{r['times_better']:.2f}",
            )
            for r in rows
        ],
    )
    save("store", rows)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
