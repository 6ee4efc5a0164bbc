"""all_reduce of sparse tensors: all ranks gather all entries and add them up.

It is complete when the call returns, because the ranks must first learn the numbers of entries.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidTypeError, MismatchError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.call import run
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.operators import Operator
from rallypoint.process_group.work import CollectiveCall
from rallypoint.pytorch.memory import Memory


def all_reduce_sparse(
    group: ProcessGroup,
    tensor: Any,  # noqa: ANN401 - of torch
    op: Operator,
    timeout: timedelta | None = None,
) -> None:
    """Combine the sparse COO tensors of all ranks, in place; their shapes must be equal.

    Args:
        timeout: how long each step may wait for a peer; None for the timeout of the group's calls.

    Raises:
        InvalidTypeError: the operator is not SUM or AVG.
        MismatchError: the shapes differ.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise InvalidTypeError(f"all_reduce of sparse tensors takes SUM or AVG, not {op}")
    own = tensor.detach().coalesce()
    places, values = own.indices().t().contiguous(), own.values().contiguous()
    told = torch.empty(group.size(), 1 + tensor.dim(), dtype=torch.int64)
    _all_gather(group, torch.tensor([places.shape[0], *tensor.shape]), list(told), timeout)
    counts, shapes = told[:, 0], told[:, 1:].tolist()
    for rank, shape in zip(group.ranks, shapes, strict=True):
        if shape != shapes[0]:
            raise MismatchError(
                f"all_reduce of sparse tensors: the tensor of rank {rank} has the shape {shape}, "
                f"that of rank {group.ranks[0]} {shapes[0]}; their shapes must be equal",
                rank=rank,
                operation="all_reduce",
            )
    all_places = [places.new_empty((int(count), places.shape[1])) for count in counts]
    all_values = [values.new_empty((int(count), *values.shape[1:])) for count in counts]
    _all_gather(group, places, all_places, timeout)
    _all_gather(group, values, all_values, timeout)
    total = torch.sparse_coo_tensor(
        torch.cat(all_places).t(), torch.cat(all_values), tensor.shape, check_invariants=False
    ).coalesce()
    if op is ReduceOp.AVG:
        total = total / group.size()
    with torch.no_grad():  # a detached tensor would take over the entries
        tensor.copy_(total)


def _all_gather(
    group: ProcessGroup,
    source: Any,  # noqa: ANN401 - of torch
    targets: list[Any],
    timeout: timedelta | None,
) -> None:
    memory = Memory("all_reduce", moves=True)
    array, arrays = memory.reads(source), [memory.writes(target) for target in targets]
    call = CollectiveCall(
        Collective.ALL_GATHER, "all_reduce", array, arrays, timeout=timeout, uneven=True
    )
    run(group, call)
    memory.finish()
