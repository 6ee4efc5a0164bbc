"""Ranks as threads of one process, each with its own end of a communicator.

They may be on one make-believe host, on a host each, or on some hosts: ranks of one host share
memory, those of different hosts are connected by TCP, from the start or ("late") when they need it.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rallypoint._native import region_bytes
from rallypoint.engine.communicator import Communicator, FarPeer, LateMesh, PeerMemoryAccess
from rallypoint.engine.engine_work import EngineWork
from rallypoint.process_group.formation.mesh import neighbours
from rallypoint.process_group.planning import AlgorithmOptions, Algorithms, Planner
from rallypoint.schedule.encode import encode
from rallypoint.schedule.program import Collective, Program

# Which rank is on which host.
TRANSPORTS: dict[str, Callable[[int, int], int]] = {
    "shm": lambda _rank, _ranks: 0,
    "tcp": lambda rank, _ranks: rank,
    "two hosts": lambda rank, ranks: int(rank >= (ranks + 1) // 2),
    "interleaved hosts": lambda rank, _ranks: rank % 2,
    "late": lambda rank, _ranks: rank // 2,
}
# What is read where it lies: as ranks of one process do, as those of several do, and from arenas.
REACHES = {"shared": (7, True), "read": (7, False), "tried": (3, False), "arenas": (1, False)}
TRANSPORTS |= dict.fromkeys(REACHES, TRANSPORTS["shm"])
FUTEX = {"x86_64": "202", "aarch64": "98"}
chosen_transport = "shm"  # unless a test says otherwise; see conftest.py


def connected() -> tuple[int, int]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
    for each in (caller, called):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return caller.detach(), called.detach()


def connect(hosts: Sequence[int], streams: int) -> list[list[FarPeer]]:
    """For each rank, those on other hosts."""
    peers: list[list[FarPeer]] = [[] for _ in hosts]
    for one in range(len(hosts)):
        for other in range(one):
            if hosts[one] == hosts[other]:
                continue
            (a, b), (c, d), *data = (connected() for _ in range(2 + streams))
            peers[one].append(FarPeer(other, os.getpid(), a, c, [end for end, _ in data]))
            peers[other].append(FarPeer(one, os.getpid(), b, d, [end for _, end in data]))
    return peers


def connect_late(hosts: Sequence[int], streams: int) -> list[tuple[list[FarPeer], LateMesh]]:
    """The same, where there are only control connections with neighbours at first."""
    ranks = range(len(hosts))
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in ranks]
    endpoints = [(rank, *listeners[rank].getsockname()) for rank in ranks]
    controls: dict[tuple[int, int], int] = {}
    for one in ranks:
        for other in neighbours(one, len(hosts)):
            if other < one:
                controls[one, other], controls[other, one] = connected()
    found = []
    for rank in ranks:
        far = [peer for peer in ranks if hosts[peer] != hosts[rank]]
        listeners[rank].setblocking(False)
        mesh = LateMesh(
            listener=listeners[rank].detach(),
            secret=b"s" * 64,
            name="run/0/0",
            streams=streams,
            congestion="",
            long_congestion="",
            silence_s=200,
            endpoints=endpoints,
            neighbours=[(peer, controls[rank, peer]) for peer in neighbours(rank, len(hosts))],
        )
        found.append(([FarPeer(peer, os.getpid(), -1, -1, []) for peer in far], mesh))
    return found


def planner(
    rank: int,
    ranks: int,
    override: str | Mapping[Collective, str],
    custom: Program | None,
    per_host: int = 0,
) -> Planner:
    def plan(number: int, root: int, nbytes: int, uneven: bool) -> tuple[bytes, bool]:
        collective = Collective(number)
        if custom is not None and collective is custom.collective:
            return encode(custom, rank), False
        name = override if isinstance(override, str) else override.get(collective, "")
        plan = Algorithms(AlgorithmOptions(name)).planner(rank, ranks, per_host)
        return plan(number, root, nbytes, uneven)

    return plan


def begin(
    communicator: Communicator,
    collective: Collective,
    *arguments: Any,
    finish: Callable[[], None] | None = None,
    **options: Any,
) -> EngineWork:
    """A collective in the background."""
    native = communicator.submit(collective, *arguments, **options)
    assert not isinstance(native, int), native
    return EngineWork(native, communicator, Collective(collective).operation, finish)


def post(
    communicator: Communicator, sends: bool, peer: int, tag: int, array: Any, **options: Any
) -> EngineWork:
    """A send or receive in the background."""
    native = communicator.post(sends, peer, tag, array, **options)
    assert not isinstance(native, int), native
    return EngineWork(native, communicator, "send" if sends else "recv")


def move(communicator: Communicator, source: int, target: int, tag: int, array: Any) -> int:
    """Send or receive, whichever this rank is to do: 0, or a code that is not."""
    if communicator.rank == source:
        return communicator.send(target, tag, array)
    return communicator.receive(source, tag, array) - source


def sleeps(thread_id: int) -> bool:
    """Whether that thread of this process sleeps in a wait of the engine: on a bell in a region."""
    task = Path(f"/proc/self/task/{thread_id}")
    try:
        number, *arguments = (task / "syscall").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    if number != FUTEX[platform.machine()]:
        return False
    place = int(arguments[0], 16)
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.partition(" ")[0].partition("-")
        if int(first, 16) <= place < int(last, 16):
            return "memfd:test" in line
    return False


@contextmanager
def struck(handler: Callable[..., object]) -> Iterator[None]:
    """In the first wait of the engine within the block, this thread gets a signal, and calls
    `handler` then."""
    before = signal.signal(signal.SIGUSR1, handler)
    thread_id, is_over = threading.get_native_id(), threading.Event()

    def strike() -> None:
        while not is_over.is_set():
            if sleeps(thread_id):
                os.kill(os.getpid(), signal.SIGUSR1)
                return
            time.sleep(0.001)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def communicators_of(
    ranks: int,
    *,
    override: str | Mapping[Collective, str] = "",
    custom: Program | None = None,
    per_host: int = 0,
    timeout_s: float = 200,
    synchronous_send: bool = False,
    transport: str | None = None,
    streams: int = 1,
    is_alone: bool | Callable[[], bool] = True,
) -> Iterator[Sequence[Communicator]]:
    """Every rank's end of one communicator."""
    place = TRANSPORTS[transport or chosen_transport]
    hosts = [place(rank, ranks) for rank in range(ranks)]
    regions: dict[int, int] = defaultdict(lambda: os.memfd_create("test"))
    for host in hosts:
        os.ftruncate(regions[host], region_bytes(ranks))
    meshes: list[LateMesh | None] = [None] * ranks
    if (transport or chosen_transport) == "late":
        peers, meshes = map(list, zip(*connect_late(hosts, streams), strict=True))
    else:
        peers = connect(hosts, streams)
    communicators = [
        Communicator(
            regions[hosts[rank]],
            rank=rank,
            ranks=ranks,
            plan=planner(rank, ranks, override, custom, per_host),
            timeout_s=timeout_s,
            spins=0,
            yields=100,
            is_alone=is_alone if callable(is_alone) else lambda: bool(is_alone),
            synchronous_send=synchronous_send,
            peers=peers[rank],
            mesh=meshes[rank],
        )
        for rank in range(ranks)
    ]
    for fd in regions.values():
        os.close(fd)
    reach, knows_itself = REACHES.get(transport or chosen_transport, (0, True))
    for communicator in communicators:
        assert reach & communicator.probe_memory() == reach
        communicator.set_reach(PeerMemoryAccess(reach), knows_itself=knows_itself)
    try:
        yield communicators
    finally:  # at once: each waits until what it has sent is acknowledged
        _side_by_side([communicator.leave for communicator in communicators])


def _side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_ranks(ranks: int, main: Callable[[Communicator], Any], **options: Any) -> Sequence[Any]:
    """Run `main` on each rank; return the results, or raise the first error: others follow it.

    Args:
        options: of `communicators_of`.
    """
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []
    with communicators_of(ranks, **options) as communicators:

        def run(rank: int) -> None:
            try:
                results[rank] = main(communicators[rank])
            except BaseException as error:
                errors.append(error)
                communicators[rank].abort()

        _side_by_side([partial(run, rank) for rank in range(ranks)])
    if errors:
        raise errors[0]
    return results
