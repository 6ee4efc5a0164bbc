"""The backend "rallypoint": how PyTorch creates a group, in the form that its version expects."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.base_group import BaseGroup, LoneGroup
from rallypoint.pytorch.formation import form, without_members
from rallypoint.pytorch.tools import untraced_function
from rallypoint.pytorch.versions import HAS_BACKENDS, attach_recorders_ourselves, check

_original_batch = dist.batch_isend_irecv
_original_manager = distributed_c10d._coalescing_manager


def install() -> None:
    """Put the functions below in the place of PyTorch's, for all groups from now on."""
    dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = batch_isend_irecv
    dist._coalescing_manager = distributed_c10d._coalescing_manager = coalescing_manager


@contextmanager
def coalescing_manager(
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> Iterator[Any]:
    """PyTorch's, whose block may end with an exception.

    PyTorch's own would then keep all later calls for the end of the block, and carry out none.
    """
    try:
        with _original_manager(group, device, async_ops) as manager:
            yield manager
    except BaseException:
        chosen = group or distributed_c10d._get_default_group()
        if isinstance(chosen, BaseGroup):
            distributed_c10d._world.pg_coalesce_state.pop(chosen, None)
            chosen.forget_coalesced()
        raise


@untraced_function
@functools.wraps(_original_batch)
def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """PyTorch's, which also has NCCL below our groups begin all of a batch together.

    Begun one after the other, ranks that all send first wait for each other. PyTorch has NCCL begin
    them together only for groups whose type is its own or, from 2.15 on, after a first call on a
    GPU.
    """
    distributed_c10d._check_p2p_op_list(p2p_op_list)
    group = p2p_op_list[0].group or distributed_c10d._get_default_group()
    device = p2p_op_list[0].tensor.device
    below = group.group_for(device) if isinstance(group, BaseGroup) else None
    if below is None:
        return list(_original_batch(p2p_op_list))
    below._start_coalescing(device)
    try:
        for one in p2p_op_list:
            peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=one.group, tag=one.tag, **peer)
    finally:
        whole = below._end_coalescing(device)
    return [whole]


def create(options: Any, _: object) -> dist.ProcessGroup:  # noqa: ANN401 - of torch
    """Create a group from the options that PyTorch gives a backend; all members call it."""
    check()
    attach_recorders_ourselves()
    install()
    arguments: dict[str, Any] = {
        "rank": options.group_rank,
        "size": options.group_size,
        "timeout": options.timeout,
        "name": str(options.group_id),
    }
    if HAS_BACKENDS and options.enable_reconfigure:
        group = without_members(options.store, **arguments)
    else:
        global_ranks = list(options.global_ranks_in_group)
        group = form(options.store, **arguments, global_ranks=global_ranks)
    return wrap_group(group, options)


def wrap_group(group: ProcessGroup, options: Any) -> dist.ProcessGroup:  # noqa: ANN401 - of torch
    """PyTorch's group over one of the engine."""
    if not HAS_BACKENDS:
        return LoneGroup(group, options.store)
    # Earlier versions do not have the class that its backend derives from.
    from rallypoint.pytorch.rallypoint_group import RallypointGroup

    return RallypointGroup(group, options.store, options.process_group)
