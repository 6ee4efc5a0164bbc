"""What it costs to be ready for losses, and to give the state to newcomers; measured by workers.

in_place.py starts itself again in workers, whose parts are here as well.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy
from workers import answer

import rallypoint as dist
from rallypoint import elastic
from rallypoint.elastic.agreement import Settlement
from rallypoint.elastic.transfer import synchronize
from rallypoint.process_group.groups.default import resolve

_BLOCK_S = 0.2
_PORT = 29777
_PIECE = 8 << 20


# What an update costs.


def measure_update(options: argparse.Namespace) -> None:
    """Steps of an all_reduce of 8 bytes, without and with an update, in turn; in each worker."""
    state = elastic.State(step=0, array=numpy.ones(options.bytes // 8))
    word = numpy.ones(1, numpy.int64)
    dist.init_process_group()

    def plain() -> None:
        dist.all_reduce(word)

    def updated() -> None:
        dist.all_reduce(word)
        with state.update():
            state.step += 1

    def update() -> None:
        with state.update():
            state.step += 1

    @elastic.run
    def train(_: elastic.State) -> dict[str, list[float]]:
        steps = {"all_reduce": plain, "again": plain, "both": updated, "update": update}
        times: dict[str, list[float]] = {name: [] for name in steps}
        count = 200
        while _seconds_of(plain, count) < _BLOCK_S / 4:  # the same on all ranks
            count *= 2
        for turn in range(options.rounds):
            names = list(steps) if turn % 2 == 0 else list(reversed(steps))
            for name in names:
                times[name].append(_seconds_of(steps[name], count) / count * 1e6)
        return times

    times = train(state)
    if dist.get_rank() == 0:
        answer({name: statistics.median(each) for name, each in times.items()})
    dist.destroy_process_group()


def _seconds_of(step: Callable[[], None], count: int) -> float:
    """The slowest rank's time for so many steps."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    took = numpy.array([time.perf_counter() - begin])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took[0])


# What a transfer costs.


def measure_transfer(options: argparse.Namespace) -> None:
    """From all ranks but the last to the last, beside a bare copy or stream; in each worker."""
    dist.init_process_group()
    size, rank = dist.get_world_size(), dist.get_rank()
    last = size - 1
    settlement = Settlement(1, tuple(range(last)), (last,))
    whole = numpy.empty(options.bytes // 8)
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname())
    is_far = hosts[0] != hosts[last]
    times: dict[str, list[float]] = {"one array": [], "many arrays": [], "bare": []}
    for turn in range(options.rounds + 1):  # the first time is not counted
        for name, count in (("one array", 1), ("many arrays", options.arrays)):
            values = {"arrays": numpy.array_split(whole, count)}
            whole[:] = -1.0 if rank == last else turn
            took = _transfer_s(values, settlement)
            if not (whole == turn).all():
                raise SystemExit("WRONG: the newcomer has not the sources' bytes")
            times[name] += [took] if turn else []
        took = _stream_s(whole, rank, last, str(hosts[0])) if is_far else _copy_s(whole, rank, last)
        times["bare"] += [took] if turn else []
    if rank == last:
        answer(times)
    dist.destroy_process_group()


def _transfer_s(values: dict[str, Any], settlement: Settlement) -> float:
    dist.barrier()
    begin = time.perf_counter()
    synchronize(values, settlement, resolve(None))
    return time.perf_counter() - begin


def _copy_s(whole: Any, rank: int, last: int) -> float:  # noqa: ANN401 - an array
    """A copy in this process, of memory that is there, while the others wait for it."""
    took = 0.0
    other = numpy.ones_like(whole) if rank == last else whole
    dist.barrier()
    if rank == last:
        source, target = whole.view(numpy.uint8), other.view(numpy.uint8)
        begin = time.perf_counter()
        for at in range(0, source.size, _PIECE):
            target[at : at + _PIECE] = source[at : at + _PIECE]
        took = time.perf_counter() - begin
    dist.barrier()
    return took


def _stream_s(whole: Any, rank: int, last: int, host: str) -> float:  # noqa: ANN401 - an array
    """One TCP connection from rank 0 to the last rank."""
    data, took = memoryview(whole.view(numpy.uint8)), 0.0
    if rank == 0:
        with socket.create_server(("0.0.0.0", _PORT)) as server:
            dist.barrier()
            connection, _ = server.accept()
            with connection:
                connection.sendall(data)
    else:
        dist.barrier()
    if rank == last:
        with socket.create_connection((host, _PORT)) as connection:
            begin, at = time.perf_counter(), 0
            while at < len(data):
                at += connection.recv_into(data[at:])
            took = time.perf_counter() - begin
    dist.barrier()
    return took
