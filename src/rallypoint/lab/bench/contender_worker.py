"""One process of a contender: does what the contest orders, and sleeps at its socket in between.

    python contender_worker.py SOCKET rallypoint|gloo|ucx|mpi    by rallypoint run or mpiexec

This script imports only NumPy and the contender's library, because it also runs in the virtual
environments of contenders, where rallypoint is not installed. Orders and answers are JSON, one to a
line. All contenders are timed by the same loop, and checked against NumPy on the same random data.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Protocol, TextIO, TypeVar

import numpy as np

Array = np.ndarray[Any, Any]
T = TypeVar("T")  # an array, or a library's wrapper of one
ROOT = 0
SEED = 20_000
# The variables by which starters number a host's processes: rallypoint run, Hydra, Open MPI's.
_RANK_VARIABLES = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")
_COMBINE: dict[str, np.ufunc] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class Library(Protocol):
    """The library that is measured. Arrays are contiguous; reductions and broadcasts work in place
    in `out`.
    """

    rank: int
    ranks: int
    version: str

    def barrier(self) -> None:
        """Wait for all ranks."""

    def call(self, operation: str, op: str, given: Array, out: Array) -> Callable[[], object]:
        """A function that performs the operation once."""

    def close(self) -> None:
        """Leave the group of ranks."""


class TorchNames:
    """Rallypoint, or PyTorch with gloo or UCX: all have torch.distributed's names."""

    def __init__(self, name: str, order: dict[str, Any]) -> None:
        self._dist: Any
        self._wrap: Callable[[Array], Any]
        if name in ("gloo", "ucx"):
            import torch

            self._dist, self._wrap = torch.distributed, torch.from_numpy
            self.version = f"torch {torch.__version__}"
            if name == "ucx":
                import commux

                commux.register()
                self.version = f"commux {importlib.metadata.version('commux')}"
            self._dist.init_process_group(name)
        else:
            import rallypoint

            self._dist, self._wrap = rallypoint, lambda array: array
            algorithm = order["algorithm"] or None
            self._dist.init_process_group(order["backend"], algorithm=algorithm)
            self.version = importlib.metadata.version("rallypoint")
        self.rank, self.ranks = self._dist.get_rank(), self._dist.get_world_size()
        self.barrier = self._dist.barrier

    def call(self, operation: str, op: str, given: Array, out: Array) -> Callable[[], object]:
        """A function that performs the operation once."""
        dist, source, target = self._dist, self._wrap(given), self._wrap(out)
        if operation == "send":
            return _there_and_back(self.rank, dist.send, dist.recv, source, target)
        combine = getattr(dist.ReduceOp, op.upper())
        whole = {"gather": out, "scatter": given}.get(operation)
        blocks = None
        if whole is not None and self.rank == ROOT:
            blocks = [self._wrap(block) for block in np.split(whole, self.ranks)]
        function, arguments = {
            "all_reduce": (dist.all_reduce, (target, combine)),
            "reduce": (dist.reduce, (target, ROOT, combine)),
            "broadcast": (dist.broadcast, (target, ROOT)),
            "all_gather": (dist.all_gather_into_tensor, (target, source)),
            "reduce_scatter": (dist.reduce_scatter_tensor, (target, source, combine)),
            "all_to_all": (dist.all_to_all_single, (target, source)),
            "gather": (dist.gather, (source, blocks, ROOT)),
            "scatter": (dist.scatter, (target, blocks, ROOT)),
            "barrier": (dist.barrier, ()),
        }[operation]
        return partial(function, *arguments)

    def close(self) -> None:
        """Leave the group of ranks."""
        self._dist.destroy_process_group()


class Mpi:
    """Any MPI, through mpi4py's calls for buffers."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self._comm.Get_rank(), self._comm.Get_size()
        found = re.search(r"\d+(\.\d+)+", MPI.Get_library_version())
        self.version = found.group() if found else "version unknown"
        self.barrier = self._comm.Barrier

    def call(self, operation: str, op: str, given: Array, out: Array) -> Callable[[], object]:
        """A function that performs the operation once."""
        comm, in_place, is_root = self._comm, self._mpi.IN_PLACE, self.rank == ROOT
        if operation == "send":
            return _there_and_back(self.rank, comm.Send, comm.Recv, given, out)
        names = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}
        combine = getattr(self._mpi, names[op])
        reduced = (in_place, out) if is_root else (out, None)
        function, arguments = {
            "all_reduce": (comm.Allreduce, (in_place, out, combine)),
            "reduce": (comm.Reduce, (*reduced, combine, ROOT)),
            "broadcast": (comm.Bcast, (out, ROOT)),
            "all_gather": (comm.Allgather, (given, out)),
            "reduce_scatter": (comm.Reduce_scatter_block, (given, out, combine)),
            "all_to_all": (comm.Alltoall, (given, out)),
            "gather": (comm.Gather, (given, out if is_root else None, ROOT)),
            "scatter": (comm.Scatter, (given if is_root else None, out, ROOT)),
            "barrier": (comm.Barrier, ()),
        }[operation]
        return partial(function, *arguments)

    def close(self) -> None:
        """Leave the group of ranks."""
        self._mpi.Finalize()


def _there_and_back(
    rank: int, send: Callable[[T, int], object], recv: Callable[[T, int], object], given: T, out: T
) -> Callable[[], object]:
    """Rank 0 sends to rank 1, which sends the data back; other ranks do nothing."""

    def ping() -> None:
        send(given, 1)
        recv(out, 1)

    def pong() -> None:
        recv(out, 0)
        send(out, 0)

    return ping if rank == 0 else pong if rank == 1 else lambda: None


class ContenderWorker:
    """Carries out each order in one process."""

    def __init__(self, library: Library, order: dict[str, Any]) -> None:
        self._library = library
        self._operation: str = order["operation"]
        self._op: str = order["op"]
        # All sizes use the same memory: where an array lies can matter more than its size.
        most = order["most_items"]
        dtype = np.dtype(order["dtype"])
        self._given = np.zeros(most * self._parts(_GIVES_PARTS), dtype)
        self._out = np.zeros(most * self._parts(_TAKES_PARTS), dtype)

    def check(self, count: int) -> dict[str, Any]:
        """Perform the operation once on random data; returns how many items are wrong here."""
        given, out, call = self._call(count)
        inputs = [self._random(rank, len(given)) for rank in range(self._library.ranks)]
        given[:] = inputs[self._library.rank]
        if self._operation in _IN_PLACE:
            out[:] = given
        call()
        due = self._due(inputs, count)
        wrong = 0 if due is None else int(np.count_nonzero(out != due))
        given[:], out[:] = 0, 0  # zeros stay zeros, however often they are combined
        return {"wrong": wrong}

    def time(self, count: int, calls: int, warmup: int) -> dict[str, Any]:
        """The time in seconds of that many calls on this rank; all ranks begin together, after the
        warm-up.
        """
        _, _, call = self._call(count)
        for _ in range(warmup):
            call()
        self._library.barrier()
        begin = time.perf_counter()
        for _ in itertools.repeat(None, calls):
            call()
        return {"seconds": time.perf_counter() - begin}

    def _call(self, count: int) -> tuple[Array, Array, Callable[[], object]]:
        given = self._given[: count * self._parts(_GIVES_PARTS)]
        out = self._out[: count * self._parts(_TAKES_PARTS)]
        return given, out, self._library.call(self._operation, self._op, given, out)

    def _parts(self, of_all: frozenset[str]) -> int:
        return self._library.ranks if self._operation in of_all else 1

    def _random(self, rank: int, items: int) -> Array:
        """Whole numbers, small enough that floats combine without rounding."""
        low, high = (1, 3) if self._op == "product" else (0, 100)
        random = np.random.default_rng(SEED + rank)
        return random.integers(low, high, items, np.int8).astype(self._given.dtype)

    def _due(self, inputs: list[Array], count: int) -> Array | None:
        """The correct contents of this rank's `out`; None if they are undefined."""
        rank, is_root = self._library.rank, self._library.rank == ROOT
        own = slice(rank * count, (rank + 1) * count)
        due: Array | None = None
        match self._operation:
            case "all_reduce":
                due = reduce(_COMBINE[self._op], inputs)
            case "reduce" if is_root:
                due = reduce(_COMBINE[self._op], inputs)
            case "reduce_scatter":
                due = reduce(_COMBINE[self._op], inputs)[own]
            case "broadcast":
                due = inputs[ROOT]
            case "scatter":
                due = inputs[ROOT][own]
            case "all_gather":
                due = np.concatenate(inputs)
            case "gather" if is_root:
                due = np.concatenate(inputs)
            case "all_to_all":
                due = np.concatenate([each[own] for each in inputs])
            case "send" if rank < 2:
                due = inputs[0]
        return due


_IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast"})
_GIVES_PARTS = frozenset({"scatter", "reduce_scatter", "all_to_all"})  # one part for each rank
_TAKES_PARTS = frozenset({"gather", "all_gather", "all_to_all"})


def main(address: str, name: str) -> None:
    """Connect, and carry out orders until ordered to stop."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + address)
    lines = connection.makefile("rw")
    try:
        _obey(name, lines)
    except Exception as error:
        traceback.print_exc()
        _say(lines, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)  # without the library's cleanup, which may wait for other ranks


def _obey(name: str, lines: TextIO) -> None:
    begin = json.loads(next(lines))
    if begin["cores"]:
        rank = int(next(os.environ[each] for each in _RANK_VARIABLES if each in os.environ))
        os.sched_setaffinity(0, {begin["cores"][rank % len(begin["cores"])]})
    library: Library = Mpi() if name == "mpi" else TorchNames(name, begin)
    worker = ContenderWorker(library, begin)
    _say(lines, {"rank": library.rank, "ranks": library.ranks, "version": library.version})
    for line in lines:
        order = json.loads(line)
        match order.pop("order"):
            case "check":
                _say(lines, worker.check(**order))
            case "time":
                _say(lines, worker.time(**order))
            case "stop":
                library.close()
                return
    os._exit(1)  # the contest has ended; the other ranks notice it too


def _say(lines: TextIO, answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
