"""Calls that the engine cannot take as they are: their tensors become arrays first.

operations.py tries the engine with a call's own tensors, which it takes if they are dense and on
the CPU. All other calls are made here, by process_group.calls, which also words the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidTypeError, MismatchError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.arrays import Array, Blocks, check_count, check_items
from rallypoint.process_group.calls.call import run
from rallypoint.process_group.calls.point_to_point import post_message
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.operators import Operator, PremulSum
from rallypoint.process_group.work import CollectiveCall
from rallypoint.pytorch.memory import Memory
from rallypoint.pytorch.torch_work import UNSET, DoneWork, RunningWork
from rallypoint.pytorch.versions import factor_of

Tensor: TypeAlias = torch.Tensor
Tensors = Any  # a tensor, a list with one for each rank, or None
Options = Any  # of torch, a class for each collective
Work: TypeAlias = dist.Work

_NOTHING = np.empty(0, np.uint8)


def collective_of_arrays(
    group: ProcessGroup,
    collective: Collective,
    operation: str,
    source: Tensors,
    target: Tensors,
    opts: Options,
    results: Sequence[Any],
    *,
    root: int,
    in_place: bool,
) -> Work:
    """Make a collective call with arrays in place of its tensors; arguments as Operations._call."""
    if collective is Collective.ALL_REDUCE and source.is_sparse:
        all_reduce_sparse(group, source, operator_of(opts.reduceOp), _timeout(opts))
        return DoneWork(results)
    memory = Memory(operation, moves=not collective.reduces)
    inputs: Blocks = _NOTHING
    outputs: Blocks = _NOTHING
    if in_place:
        inputs, outputs = _one_block(memory, collective, source, is_root=root == group.own_rank)
    elif collective is not Collective.BARRIER:
        check_sizes(group.size(), collective, operation, source, target)
        inputs, outputs = _blocks(memory.reads, source), _blocks(memory.writes, target)
    call = CollectiveCall(
        collective,
        operation,
        inputs,
        outputs,
        op=operator_of(opts.reduceOp) if collective.reduces else None,
        root=root,
        uneven=collective is Collective.ALL_TO_ALL and not isinstance(source, torch.Tensor),
        async_op=opts.asyncOp,
        timeout=_timeout(opts),
        results=results,
        then=memory.completion(in_background=opts.asyncOp),
        work_type=RunningWork,
    )
    work = run(group, call)
    return DoneWork(results) if work is None else work


def message_of_array(
    group: ProcessGroup, operation: str, tensor: Tensor, peer: int, tag: int
) -> Work:
    """Begin an "isend" or "irecv" with an array in place of the tensor."""
    sends = operation == "isend"
    memory = Memory(operation.removeprefix("i"), moves=True)
    return post_message(
        group,
        operation,
        peer,
        tag,
        memory.reads(tensor) if sends else memory.writes(tensor),
        timeout=None,
        results=[] if sends else [tensor],
        then=memory.completion(in_background=True),
        work_type=RunningWork,
    )


def _timeout(opts: Options) -> timedelta | None:
    return None if opts.timeout == UNSET else opts.timeout


def _one_block(
    memory: Memory, collective: Collective, tensor: Tensor, *, is_root: bool
) -> tuple[Blocks, Blocks]:
    """Input and output of a collective whose one tensor is both."""
    target = None
    if collective is not Collective.REDUCE or is_root:
        target = memory.writes(tensor, in_place=collective.reduces or is_root)
    if collective is Collective.BROADCAST and not is_root:
        return None, target
    return memory.reads(tensor) if target is None else target, target


def _blocks(array_of: Callable[[Tensor], Array], tensors: Tensors) -> Blocks:
    if isinstance(tensors, torch.Tensor):
        return array_of(tensors)
    return None if tensors is None else [array_of(each) for each in tensors]


def check_sizes(
    ranks: int, collective: Collective, operation: str, source: Tensors, target: Tensors
) -> None:
    """Refuse lists without a tensor for each rank, and tensors of all blocks of another size."""
    for tensors, side in ((target, "output"), (source, "input")):
        if tensors is not None and not isinstance(tensors, torch.Tensor):
            check_count(tensors, ranks, operation, side)
    if not isinstance(source, torch.Tensor) or not isinstance(target, torch.Tensor):
        return
    if collective is Collective.REDUCE_SCATTER:
        check_items(source, target.numel() * ranks, operation, "input")
    else:
        blocks = 1 if collective is Collective.ALL_TO_ALL else ranks
        check_items(target, source.numel() * blocks, operation, "output")


def all_reduce_sparse(
    group: ProcessGroup, tensor: Tensor, op: Operator, timeout: timedelta | None = None
) -> None:
    """Combine the sparse COO tensors of all ranks, in place; their shapes must be equal.

    It is complete when the call returns, because the ranks must first learn the numbers of entries.
    Each step may wait for a peer for the timeout.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise InvalidTypeError(f"all_reduce of sparse tensors takes SUM or AVG, not {op}")
    own = tensor.detach().coalesce()
    positions, values = own.indices().t().contiguous(), own.values().contiguous()
    sizes = torch.empty(group.size(), 1 + tensor.dim(), dtype=torch.int64)
    _all_gather(group, torch.tensor([positions.shape[0], *tensor.shape]), list(sizes), timeout)
    counts, shapes = sizes[:, 0], sizes[:, 1:].tolist()
    for rank, shape in zip(group.ranks, shapes, strict=True):
        if shape != shapes[0]:
            raise MismatchError(
                f"all_reduce of sparse tensors: the tensor of rank {rank} has the shape {shape}, "
                f"that of rank {group.ranks[0]} {shapes[0]}; their shapes must be equal",
                rank=rank,
                operation="all_reduce",
            )
    all_positions = [positions.new_empty((int(count), positions.shape[1])) for count in counts]
    all_values = [values.new_empty((int(count), *values.shape[1:])) for count in counts]
    _all_gather(group, positions, all_positions, timeout)
    _all_gather(group, values, all_values, timeout)
    total = torch.sparse_coo_tensor(
        torch.cat(all_positions).t(), torch.cat(all_values), tensor.shape, check_invariants=False
    ).coalesce()
    if op is ReduceOp.AVG:
        total = total / group.size()
    with torch.no_grad():  # a detached tensor would take over the entries
        tensor.copy_(total)


def _all_gather(
    group: ProcessGroup, source: Tensor, targets: list[Tensor], timeout: timedelta | None
) -> None:
    memory = Memory("all_reduce", moves=True)
    array = memory.reads(source)
    outputs = [memory.writes(target) for target in targets]
    call = CollectiveCall(
        Collective.ALL_GATHER, "all_reduce", array, outputs, timeout=timeout, uneven=True
    )
    run(group, call)
    memory.finish()


def operator_of(op: dist.ReduceOp) -> Operator:
    """The engine's operator for one of torch's."""
    code = int(op.op)
    return PremulSum(factor_of(op)) if code == ReduceOp.PREMUL_SUM else ReduceOp(code)
