"""Makes calls of our own API on a backend of PyTorch: gloo, nccl, hccl.

`delegate_group` creates its process group. NCCL and HCCL take tensors of one device per rank;
HCCL's calls have run with a stand-in only.
"""

# ruff: noqa: ANN401 - PyTorch's objects

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.delegated.delegate import (
    Block,
    Delegate,
    LibraryCall,
    LibraryFailure,
    LibraryMember,
    Pending,
)
from rallypoint.process_group.memory.arrays import DeviceArray, describe, dtype_name
from rallypoint.process_group.operators import Operator, PremulSum
from rallypoint.pytorch.delegate_group import make_group, own_device
from rallypoint.pytorch.libraries import why_not
from rallypoint.pytorch.versions import method_of

# Each collective's method of a group of PyTorch's, and the type of its options.
_CALLS: dict[Collective, tuple[str, type[Any]]] = {
    Collective.ALL_REDUCE: ("allreduce", c10d.AllreduceOptions),
    Collective.REDUCE: ("reduce", c10d.ReduceOptions),
    Collective.BROADCAST: ("broadcast", c10d.BroadcastOptions),
    Collective.ALL_GATHER: ("allgather", c10d.AllgatherOptions),
    Collective.GATHER: ("gather", c10d.GatherOptions),
    Collective.SCATTER: ("scatter", c10d.ScatterOptions),
    Collective.REDUCE_SCATTER: ("reduce_scatter", c10d.ReduceScatterOptions),
    Collective.ALL_TO_ALL: ("all_to_all_single", c10d.AllToAllOptions),
    Collective.BARRIER: ("barrier", c10d.BarrierOptions),
}
_LATE = ("timed out", "timeout", "did not complete within")  # in the text of errors
_LOST = (
    *("connection closed", "connection reset", "connection refused", "broken pipe"),
    *("peer", "remote process exited", "socket"),
)
_OF_BOOLS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


class _TorchPending:
    """A Work of torch.distributed; `finish` runs after it, on the device if the work does."""

    def __init__(self, work: Any, *, is_here: bool, finish: Callable[[], None] | None) -> None:
        self._work = work
        self._is_here = is_here
        self._finish = finish

    def wait(self, timeout_s: float) -> None:
        if self._is_here:
            self._work.wait(timedelta(seconds=timeout_s))
        else:
            self._work.wait()  # the current stream waits; with a time-out, this thread would
        if self._finish is not None:
            self._finish()
            self._finish = None

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def source(self) -> int:
        return int(self._work._source_rank())


class _GlooTransfer:
    """A send or receive of gloo, which notices that it has finished only while a thread waits.

    So a thread of its own waits, from the first time that its state is queried.
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


class TorchDelegate(Delegate):
    """One group's end of a backend of PyTorch's."""

    patience_s = math.inf  # after a time-out, a Work of gloo has broken its connections

    def __init__(self, member: LibraryMember) -> None:
        """Form a group of PyTorch's for these members; all of them call it."""
        self._device = own_device(member)
        self._group, self._store = make_group(member, self._device)
        self.name = member.name
        self.device: str = self._device.type
        self._rank = member.rank
        self._batch: _Batch | None = None

    def why_not(self, collective: Collective, dtype: str, operator: Operator | None) -> str:
        if collective not in _CALLS:
            return (
                f"{self.name} has no such operation; backend='rallypoint' has "
                f"{collective.operation}"
            )
        return why_not(self.name, dtype, operator)

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

    def begin(self, request: LibraryCall) -> Pending:
        collective = request.collective
        name, options_type = _CALLS[collective]
        method, options = method_of(self._group, name), options_type()
        options.timeout = timedelta(seconds=request.timeout_s)
        if collective.has_root:
            options.rootRank = request.root
        if request.operator is not None:
            options.reduceOp = _operator(request.operator, request.dtype)
        if collective is Collective.BARRIER:
            if self.device != "cpu":
                options.device_ids = [self._device.index or 0]
                options.device = self._device
            return self._pending(method(options))
        form = _as_real if collective.reduces else _as_bytes
        inputs, outputs = list(map(form, request.inputs)), list(map(form, request.outputs))
        if collective is Collective.ALL_TO_ALL:
            return self._all_to_all(method, inputs, outputs, options)
        has_lists = not collective.has_root or request.root == self._rank
        if collective in (Collective.ALL_GATHER, Collective.GATHER):
            work = method([outputs] if has_lists else [], inputs, options)
        elif collective in (Collective.REDUCE_SCATTER, Collective.SCATTER):
            work = method(outputs, [inputs] if has_lists else [], options)
        else:
            work = method(outputs, options)
        return self._pending(work)

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
        if self.name == "nccl":  # whose transfers wait for others that are begun later
            self._group._start_coalescing(self._device)
            self._batch = _Batch()

    def close_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.work = self._group._end_coalescing(self._device)

    def trouble(self, error: Exception) -> LibraryFailure:
        text = str(error).lower()  # PyTorch's errors differ in nothing else
        if any(words in text for words in _LATE):
            return LibraryFailure.LATE
        if any(words in text for words in _LOST):
            return LibraryFailure.LOST
        return LibraryFailure.OTHER

    def close(self) -> None:
        self._group.shutdown()

    def abort(self) -> None:
        self._group.abort()

    def _pending(self, work: Any, finish: Callable[[], None] | None = None) -> Pending:
        return _TorchPending(work, is_here=self.device == "cpu", finish=finish)

    def _pending_transfer(self, work: Any) -> Pending:
        return self._pending(work if self._batch is None else self._batch)

    def _all_to_all(
        self,
        method: Callable[..., Any],
        inputs: Sequence[Block],
        outputs: Sequence[Block],
        options: Any,
    ) -> Pending:
        source = torch.cat(inputs)
        sizes = [len(each) for each in outputs]
        target = source.new_empty(sum(sizes))

        def spread() -> None:
            for block, part in zip(outputs, target.split(sizes), strict=True):
                block.copy_(part)

        input_sizes = [len(each) for each in inputs]
        return self._pending(method(target, source, sizes, input_sizes, options), spread)


def _operator(operator: Operator, dtype: str) -> Any:
    if isinstance(operator, PremulSum):
        return dist._make_nccl_premul_sum(operator.factor)
    if dtype == "bool":
        operator = _OF_BOOLS.get(operator, operator)
    return getattr(dist.ReduceOp, operator.name)


def _as_real(block: Block) -> Block:
    """The block as real numbers: both parts of complex ones."""
    return torch.view_as_real(block).view(-1) if block.is_complex() else block


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
