"""Makes calls of our own API on a backend of PyTorch: gloo, nccl, hccl, for one kind of device.

The process groups are no default groups, and appear in none of torch.distributed's lists, so that a
program may use PyTorch's groups beside ours. PyTorch's ranks use our store through
`StoreAdapter`. HCCL's calls have run with a stand-in only.
"""

# ruff: noqa: ANN401 - PyTorch's objects

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rallypoint.base import worker_hook
from rallypoint.base.errors import (
    HostError,
    InvalidArgumentError,
    InvalidTypeError,
    StoreError,
    StoreTimeoutError,
)
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.arrays import Array, DeviceArray, address, describe, dtype_name
from rallypoint.process_group.delegated.delegate import (
    Block,
    BuiltInDelegate,
    LibraryCall,
    LibraryFailure,
    LibraryMember,
    Pending,
)
from rallypoint.process_group.operators import Operator, PremulSum
from rallypoint.pytorch import other_backends
from rallypoint.pytorch.device_groups import RankDevices, read_devices, why_staged
from rallypoint.pytorch.libraries import OPERATORS
from rallypoint.store.store import Store

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

    work: dist.Work
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

    def __init__(self, work: dist.Work) -> None:
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

    work: dist.Work

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
        self._device = _own_device(member)
        self._group, self._store = _make_group(member, self._device)
        self.name = member.name
        self.combines = OPERATORS.get(member.name, OPERATORS["nccl"])
        self.device: str = self._device.type
        self._rank = member.rank
        self._batch: _Batch | None = None

    def adopt(self, array: Array | DeviceArray) -> Block:
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

    def _pending(self, work: dist.Work, finish: Callable[[], None] | None = None) -> Pending:
        return _TorchPending(work, is_here=self.device == "cpu", finish=finish)

    def _pending_transfer(self, work: dist.Work) -> Pending:
        return self._pending(work if self._batch is None else self._batch)

    def _all_reduce(self, request: LibraryCall) -> Pending:
        blocks = _parts(request.outputs)
        return self._start(self._group.allreduce, request, c10d.AllreduceOptions(), blocks)

    def _reduce(self, request: LibraryCall) -> Pending:
        blocks = _parts(request.outputs)
        return self._start(self._group.reduce, request, c10d.ReduceOptions(), blocks)

    def _broadcast(self, request: LibraryCall) -> Pending:
        blocks = _bytes(request.outputs)
        return self._start(self._group.broadcast, request, c10d.BroadcastOptions(), blocks)

    def _all_gather(self, request: LibraryCall) -> Pending:
        blocks = [_bytes(request.outputs)], _bytes(request.inputs)
        return self._start(self._group.allgather, request, c10d.AllgatherOptions(), *blocks)

    def _gather(self, request: LibraryCall) -> Pending:
        outputs = [_bytes(request.outputs)] if request.root == self._rank else []
        blocks = outputs, _bytes(request.inputs)
        return self._start(self._group.gather, request, c10d.GatherOptions(), *blocks)

    def _scatter(self, request: LibraryCall) -> Pending:
        inputs = [_bytes(request.inputs)] if request.root == self._rank else []
        blocks = _bytes(request.outputs), inputs
        return self._start(self._group.scatter, request, c10d.ScatterOptions(), *blocks)

    def _reduce_scatter(self, request: LibraryCall) -> Pending:
        blocks = _parts(request.outputs), [_parts(request.inputs)]
        options = c10d.ReduceScatterOptions()
        return self._start(self._group.reduce_scatter, request, options, *blocks)

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
        return self._start(exchange, request, c10d.AllToAllOptions(), *given, finish=spread)

    def _barrier(self, request: LibraryCall) -> Pending:
        options = c10d.BarrierOptions()
        if self.device != "cpu":
            options.device_ids = [self._device.index or 0]
            options.device = self._device
        return self._start(self._group.barrier, request, options)

    def _start(
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


def _operator(operator: Operator, dtype: str) -> dist.ReduceOp:
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


def _as_tensor(array: Array) -> torch.Tensor:
    """A flat tensor of a contiguous array's memory, also of a read-only array."""
    if array.size == 0:
        return torch.empty(0, dtype=getattr(torch, dtype_name(array)))
    # torch accepts an interface that says that the memory is writable.
    layout = {**array.__array_interface__, "data": (address(array), False), "shape": (array.size,)}
    flat = torch.from_numpy(np.asarray(SimpleNamespace(array=array, __array_interface__=layout)))
    return flat.view(torch.bfloat16) if dtype_name(array) == "bfloat16" else flat


def _own_device(member: LibraryMember) -> torch.device:
    """The device whose memory this rank's calls use; the process is bound to it."""
    kind = _kind(member.name)
    if kind == "cpu":
        return torch.device("cpu")
    device = _bound_device(member, kind)
    if member.name == "nccl":
        _check_gpus_differ(member)
    return device


def _make_group(member: LibraryMember, device: torch.device) -> tuple[Any, StoreAdapter]:
    """Create a group, or a backend, of PyTorch's for these calls, with its store.

    PyTorch calls the store's methods only while a reference to it exists in Python.
    """
    adapter = StoreAdapter(member.store)
    store = dist.PrefixStore("torch", adapter)
    types = dist.ProcessGroup.BackendType
    if member.name == "gloo":
        backend, number = _gloo(member, store), types.GLOO
    elif member.name == "nccl":
        backend, number = _nccl(member, store), types.NCCL
    else:
        return _plugged_in(member, store), adapter
    # As torch.distributed creates them: the recorders identify calls by group names.
    whole = dist.ProcessGroup(store, member.rank, len(member.ranks))
    whole._set_default_backend(number)
    whole._register_backend(device, number, backend)
    whole._set_group_name(f"rallypoint/{member.prefix}")
    whole._set_group_desc(member.title)
    if worker_hook.flight_record:
        other_backends.watch(whole, member.ranks, title=member.title)
    return whole, adapter


def _kind(name: str) -> str:
    """The kind of device, as registered with PyTorch together with the backend."""
    if name == "gloo":
        return "cpu"
    return str(dist.Backend.backend_capability.get(name, ["cpu"])[0])


def _bound_device(member: LibraryMember, kind: str) -> torch.device:
    """This process's own device of that kind, which is made its current one."""
    devices = getattr(torch, kind)
    count = devices.device_count()
    text = member.environ.get("LOCAL_RANK", "0") if count > 1 else "0"
    if isinstance(member.device, int):
        text = str(member.device)
    elif member.device is not None:
        text = str(torch.device(member.device).index or 0)
    if not text.isdecimal() or int(text) >= count:
        raise HostError(
            f"rank {member.ranks[member.rank]} is to use {kind}:{text}, but this process sees "
            f"{count} of them; start as many processes on each host as it has devices "
            "(--nproc-per-node gpu)"
        )
    devices.set_device(int(text))
    return torch.device(kind, int(text))


def _check_gpus_differ(member: LibraryMember) -> None:
    """Check that no two ranks use the same GPU; all ranks reach the same result."""
    store = member.store
    store.set(f"seat/{member.rank}", json.dumps(RankDevices.own()))
    keys = [f"seat/{rank}" for rank in range(len(member.ranks))]
    store.wait(keys, member.timeout)
    if why := why_staged(read_devices(store.multi_get(keys))):
        raise HostError(f"backend='nccl' cannot serve these ranks: {why}; use backend='rallypoint'")


def _gloo(member: LibraryMember, store: dist.Store) -> c10d.Backend:
    kind: Any = c10d.ProcessGroupGloo
    options = kind._Options()
    options._timeout = member.timeout
    options._devices = [kind.create_device(hostname=member.address)]
    return kind(store, member.rank, len(member.ranks), options)


def _nccl(member: LibraryMember, store: dist.Store) -> c10d.Backend:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = member.timeout
    return c10d.ProcessGroupNCCL(store, member.rank, len(member.ranks), options)


def _plugged_in(member: LibraryMember, store: dist.Store) -> c10d.Backend:
    """A backend that another package has registered with PyTorch."""
    plugin = dist.Backend._plugins[member.name.upper()]
    rank, size = member.rank, len(member.ranks)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, member.timeout)
    options = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = member.timeout, member.prefix
    options.global_ranks_in_group = list(member.ranks)
    return plugin.creator_fn(options, None)


# What PyTorch's C++ calls as our callers do.
_FORWARDED = (
    "set get add append compare_set check delete_key num_keys multi_get multi_set set_timeout"
)


class StoreAdapter(dist.Store):
    """The store that PyTorch's C++ calls; it recognises a store's errors by their text."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        for name in _FORWARDED.split():
            setattr(self, name, getattr(store, name))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        try:
            self._store.wait(list(keys), timeout)
        except StoreTimeoutError as error:
            raise dist.DistStoreError(f"wait timeout: {error}") from None
        except StoreError as error:
            raise dist.DistNetworkError(str(error)) from None

    def has_extended_api(self) -> bool:
        """Whether it has append, multi_get and multi_set."""
        return True
