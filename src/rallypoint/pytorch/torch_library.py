"""Makes calls of our own API on a backend of PyTorch: gloo, nccl, hccl.

`delegate_group` creates its process group. NCCL and HCCL take tensors of one device per rank;
HCCL's calls have run with a stand-in only.
"""

# ruff: noqa: ANN401 - PyTorch's objects

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.delegated.delegate import (
    Block,
    BuiltInDelegate,
    LibraryCall,
    LibraryFailure,
    LibraryMember,
    Pending,
)
from rallypoint.process_group.memory.arrays import DeviceArray, describe, dtype_name
from rallypoint.process_group.operators import Operator, PremulSum
from rallypoint.pytorch.delegate_group import make_group, own_device
from rallypoint.pytorch.libraries import OPERATORS

# How PyTorch's errors are recognised.
_LATE = ("timed out", "timeout", "did not complete within")
_LOST = (
    *("connection closed", "connection reset", "connection refused", "broken pipe", "peer"),
    *("remote process exited", "socket"),
)
_OF_BOOLS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


@dataclass(slots=True)
class _TorchPending:
    """A Work of torch.distributed; `finish` runs after it, on the device if the work does."""

    work: Any
    is_here: bool
    finish: Callable[[], None] | None

    def wait(self, timeout_s: float) -> None:
        if self.is_here:
            self.work.wait(timedelta(seconds=timeout_s))
        else:
            self.work.wait()  # the current stream waits; with a time-out, this thread would
        if self.finish is not None:
            self.finish()
            self.finish = None

    def is_done(self) -> bool:
        return bool(self.work.is_completed())

    def source(self) -> int:
        return int(self.work._source_rank())


class _GlooTransfer:
    """A send or receive of gloo, which notices that it has finished only while a thread waits.

    Therefore a separate thread waits, from the first time that its state is queried.
    """

    def __init__(self, work: Any) -> None:
        self._work = work
        self._is_over = threading.Event()
        self._waiter: threading.Thread | None = None
        self._error: Exception | None = None

    def wait(self, timeout_s: float) -> None:
        if self._is_over.is_set():
            pass
        elif self._waiter is None:
            self._work.wait(timedelta(seconds=timeout_s))
            self._is_over.set()
        elif not self._is_over.wait(timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        if self._waiter is None and not self._is_over.is_set():
            self._waiter = threading.Thread(target=self._serve, daemon=True)
            self._waiter.start()
        return self._is_over.is_set()

    def source(self) -> int:
        return int(self._work._source_rank())

    def _serve(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._is_over.set()


class _Batch:
    """The one Work of transfers that begin together; it is there once they have begun."""

    work: Any = None

    def wait(self) -> None:
        self.work.wait()

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def _source_rank(self) -> int:
        return -1


class TorchDelegate(BuiltInDelegate):
    """A group of one of PyTorch's backends."""

    patience_s = math.inf  # after a time-out, a Work of gloo has broken its connections

    def __init__(self, member: LibraryMember) -> None:
        """Form a group of PyTorch's for these members; all of them call it."""
        self._device = own_device(member)
        self._group, self._store = make_group(member, self._device)
        self.name = member.name
        self.combines = OPERATORS.get(member.name, OPERATORS["nccl"])
        self.device: str = self._device.type
        self._rank = member.rank
        self._batch: _Batch | None = None

    def adopt(self, array: Any) -> Block:
        if isinstance(array, DeviceArray):
            theirs = array.tensor.device
            if (theirs.type, theirs.index or 0) != (self.device, self._device.index or 0):
                raise InvalidTypeError(
                    f"{self.name} takes tensors of this rank's own device, {self._device}, but one "
                    f"is on {theirs}; move it with .to({str(self._device)!r})"
                )
            return array.tensor.detach().reshape(-1)
        if self.device != "cpu":
            raise InvalidTypeError(
                f"{self.name} takes tensors on {self._device}, not {describe(array)} on the CPU; "
                f"move it with .to({str(self._device)!r})"
            )
        return _as_tensor(array)

    def empty(self, model: Block, items: int) -> Block:
        return model.new_empty(items)

    def transfer(self, *, sends: bool, peer: int, tag: int, block: Block) -> Pending:
        block = _as_bytes(block)
        pending = _GlooTransfer if self.name == "gloo" else self._pending_transfer
        if sends:
            return pending(self._group.send([block], peer, tag))
        if peer < 0:
            if self.name != "gloo":
                raise InvalidArgumentError(
                    f"{self.name} cannot receive from any rank; name one: src="
                )
            return pending(self._group.recv_anysource([block], tag))
        return pending(self._group.recv([block], peer, tag))

    def open_batch(self) -> None:
        """Only NCCL's transfers wait for others that are begun later."""
        if self.name == "nccl":
            self._group._start_coalescing(self._device)
            self._batch = _Batch()

    def close_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.work = self._group._end_coalescing(self._device)

    def trouble(self, error: Exception) -> LibraryFailure:
        words = str(error).lower()
        if any(each in words for each in _LATE):
            return LibraryFailure.LATE
        return LibraryFailure.LOST if any(each in words for each in _LOST) else LibraryFailure.OTHER

    def close(self) -> None:
        self._group.shutdown()

    def abort(self) -> None:
        self._group.abort()

    def _pending(self, work: Any, finish: Callable[[], None] | None = None) -> Pending:
        return _TorchPending(work, is_here=self.device == "cpu", finish=finish)

    def _pending_transfer(self, work: Any) -> Pending:
        return self._pending(work if self._batch is None else self._batch)

    def _all_reduce(self, request: LibraryCall) -> Pending:
        blocks = _parts(request.outputs)
        return self._one(self._group.allreduce, request, c10d.AllreduceOptions(), blocks)

    def _reduce(self, request: LibraryCall) -> Pending:
        blocks = _parts(request.outputs)
        return self._one(self._group.reduce, request, c10d.ReduceOptions(), blocks)

    def _broadcast(self, request: LibraryCall) -> Pending:
        blocks = _bytes(request.outputs)
        return self._one(self._group.broadcast, request, c10d.BroadcastOptions(), blocks)

    def _all_gather(self, request: LibraryCall) -> Pending:
        blocks = [_bytes(request.outputs)], _bytes(request.inputs)
        return self._one(self._group.allgather, request, c10d.AllgatherOptions(), *blocks)

    def _gather(self, request: LibraryCall) -> Pending:
        outputs = [_bytes(request.outputs)] if request.root == self._rank else []
        blocks = outputs, _bytes(request.inputs)
        return self._one(self._group.gather, request, c10d.GatherOptions(), *blocks)

    def _scatter(self, request: LibraryCall) -> Pending:
        inputs = [_bytes(request.inputs)] if request.root == self._rank else []
        blocks = _bytes(request.outputs), inputs
        return self._one(self._group.scatter, request, c10d.ScatterOptions(), *blocks)

    def _reduce_scatter(self, request: LibraryCall) -> Pending:
        blocks = _parts(request.outputs), [_parts(request.inputs)]
        return self._one(self._group.reduce_scatter, request, c10d.ReduceScatterOptions(), *blocks)

    def _all_to_all(self, request: LibraryCall) -> Pending:
        inputs, outputs = _bytes(request.inputs), _bytes(request.outputs)
        sizes = [len(each) for each in outputs], [len(each) for each in inputs]
        source = torch.cat(inputs)
        target = source.new_empty(sum(sizes[0]))

        def spread() -> None:
            for block, part in zip(outputs, target.split(sizes[0]), strict=True):
                block.copy_(part)

        exchange = getattr(self._group, "all_to_all_single", None) or self._group.alltoall_base
        given = target, source, *sizes
        return self._one(exchange, request, c10d.AllToAllOptions(), *given, finish=spread)

    def _barrier(self, request: LibraryCall) -> Pending:
        options = c10d.BarrierOptions()
        if self.device != "cpu":
            options.device_ids = [self._device.index or 0]
            options.device = self._device
        return self._one(self._group.barrier, request, options)

    def _one(
        self,
        method: Callable[..., Any],
        request: LibraryCall,
        options: Any,
        *given: Any,
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        options.timeout = timedelta(seconds=request.timeout_s)
        if request.operator is not None:
            options.reduceOp = _operator(request.operator, request.dtype)
        if request.collective.has_root:
            options.rootRank = request.root
        return self._pending(method(*given, options), finish)


def _operator(operator: Operator, dtype: str) -> Any:
    if isinstance(operator, PremulSum):
        return dist._make_nccl_premul_sum(operator.factor)
    if dtype == "bool":
        operator = _OF_BOOLS.get(operator, operator)
    return getattr(dist.ReduceOp, operator.name)


def _parts(blocks: Sequence[Block]) -> list[Block]:
    """The blocks as real numbers: both parts of complex ones."""
    return [torch.view_as_real(each).view(-1) if each.is_complex() else each for each in blocks]


def _bytes(blocks: Sequence[Block]) -> list[Block]:
    return [_as_bytes(block) for block in blocks]


def _as_bytes(block: Block) -> Block:
    """The block as bytes, for calls that only move items."""
    return block.view(torch.uint8)


class _Writable:
    """An interface to an array's memory that torch accepts without checking that it is writable."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__array_interface__ = {
            "version": 3,
            "data": (array.__array_interface__["data"][0], False),
            "shape": (array.size,),
            "typestr": array.dtype.str,
        }


def _as_tensor(array: Any) -> Any:
    """A flat tensor of a contiguous array's memory; if the array is read-only, callers must only
    read.
    """
    if array.size == 0:
        return torch.empty(0, dtype=getattr(torch, dtype_name(array)))
    flat = torch.from_numpy(np.asarray(_Writable(array)))
    return flat.view(torch.bfloat16) if dtype_name(array) == "bfloat16" else flat
