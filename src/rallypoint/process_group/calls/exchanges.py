"""Collectives on one array per rank: all_gather, gather, scatter, reduce_scatter, all_to_all.

Names, arguments and semantics are torch.distributed's. Functions that take a list of arrays allow
blocks of different lengths if every rank knows all lengths (all_gather, reduce_scatter), or the
sender and the receiver of each block know its length (all_to_all). Functions that take one large
array store the ranks' blocks one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Never

import numpy as np

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.arrays import (
    Array,
    Blocks,
    as_array,
    as_arrays,
    check_alike,
    check_divides,
    check_items,
    part_sizes,
)
from rallypoint.process_group.calls.call import Form, run, short_way
from rallypoint.process_group.groups.default import Group, joined, peer
from rallypoint.process_group.operators import Operator, check_operator
from rallypoint.process_group.work import CollectiveCall, Work, ended_on_error, together

_SUM = ReduceOp.SUM


@short_way(Collective.ALL_GATHER, Form.APART, source="tensor", target="tensor_list")
def all_gather(
    tensor_list: list[Array],
    tensor: Array,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Collect the arrays of all ranks on every rank.

    Args:
        tensor_list: one array per rank, with as many items as that rank's `tensor`; filled in.
        tensor: this rank's array; the same dtype on every rank.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: of docs/algorithms.md, or your own file; equal on all ranks; None: the group's.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or a read-only output.
        InvalidArgumentError: arrays do not fit each other or the group; no such rank or algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "all_gather"
    if (chosen := joined(group, name)) is None:
        return None
    source = as_array(tensor, name)
    targets = as_arrays(tensor_list, name, "tensor_list", count=chosen.size(), writes=True)
    check_alike(targets, source, name, "tensor_list")
    own = chosen.own_rank
    check_items(targets[own], source.size, name, f"tensor_list[{own}]")
    call = CollectiveCall(
        Collective.ALL_GATHER, name, source, targets, async_op, timeout, algorithm
    )
    return run(chosen, call)


@short_way(Collective.ALL_GATHER, Form.APART, source="input_tensor", target="output_tensor")
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Collect the arrays of all ranks on every rank, one after the other in one array.

    Args:
        output_tensor: any shape, with (number of ranks) * `input_tensor.size` items; filled in.
        input_tensor: the same size and dtype on every rank; may be this rank's part of the output.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: of docs/algorithms.md, or your own file; equal on all ranks; None: the group's.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or a read-only output.
        InvalidArgumentError: arrays do not fit each other or the group; no such rank or algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "all_gather_into_tensor"
    if (chosen := joined(group, name)) is None:
        return None
    source, target = as_array(input_tensor, name), as_array(output_tensor, name, writes=True)
    check_alike([target], source, name, "output_tensor")
    check_items(target, source.size * chosen.size(), name, "output_tensor")
    call = CollectiveCall(Collective.ALL_GATHER, name, source, target, async_op, timeout, algorithm)
    return run(chosen, call)


all_gather_single = all_gather_into_tensor  # its name since PyTorch 2.13


def all_gather_coalesced(
    output_tensor_lists: list[list[Array]],
    input_tensor_list: list[Array],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """all_gather of several arrays.

    Args:
        output_tensor_lists: for each rank, a list of arrays with the sizes of that rank's
            `input_tensor_list`; filled in.
        input_tensor_list: equally many arrays on every rank.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or a read-only output.
        InvalidArgumentError: arrays do not fit each other or the group; no such rank or algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "all_gather_coalesced"
    if (chosen := joined(group, name)) is None:
        return None
    if not isinstance(output_tensor_lists, list | tuple) or not isinstance(
        input_tensor_list, list | tuple
    ):
        raise InvalidTypeError(
            f"{name}: output_tensor_lists must be a list of lists of arrays, and input_tensor_list "
            "a list of arrays"
        )
    lengths = [len(arrays) for arrays in output_tensor_lists]
    if lengths != [len(input_tensor_list)] * chosen.size():
        raise InvalidArgumentError(
            f"{name}: output_tensor_lists must have {chosen.size()} lists, one for each rank, of "
            f"{len(input_tensor_list)} arrays each, one for each input; it has {lengths}"
        )
    works: list[Work | None] = []
    with ended_on_error(works):
        for *outputs, array in zip(*output_tensor_lists, input_tensor_list, strict=True):
            works.append(
                all_gather(outputs, array, group, True, timeout=timeout, algorithm=algorithm)
            )
    return together(works, async_op)


@short_way(Collective.GATHER, Form.APART, source="tensor", target="gather_list", default_root=0)
def gather(
    tensor: Array,
    gather_list: list[Array] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Collect the arrays of all ranks on rank `dst` (0 unless given).

    Args:
        tensor: the same size and dtype on every rank.
        gather_list: on `dst` one array per rank, filled in; None on the other ranks.
        dst, group_dst: the rank that collects: its global rank, or its rank in the group.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: of docs/algorithms.md, or your own file; equal on all ranks; None: the group's.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or a read-only output.
        InvalidArgumentError: arrays do not fit each other or the group; no such rank or algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "gather"
    if (chosen := joined(group, name)) is None:
        return None
    root = peer(chosen, dst, group_dst, "dst", 0)
    is_root = root == chosen.own_rank
    source = as_array(tensor, name)
    targets = None
    if is_root:
        targets = as_arrays(gather_list, name, "gather_list", count=chosen.size(), writes=True)
        _check_like(targets, source, name, "gather_list")
    elif gather_list:
        refuse_list(name, "gather_list", "dst", chosen.ranks[root])
    call = CollectiveCall(
        Collective.GATHER, name, source, targets, async_op, timeout, algorithm, root=root
    )
    return run(chosen, call)


@short_way(Collective.SCATTER, Form.APART, source="scatter_list", target="tensor", default_root=0)
def scatter(
    tensor: Array,
    scatter_list: list[Array] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Give each rank its array from a list on rank `src` (0 unless given).

    Args:
        tensor: filled in; the same size and dtype on every rank.
        scatter_list: on `src` one array per rank; None on the other ranks.
        src, group_src: the rank that has the list: its global rank, or its rank in the group.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: of docs/algorithms.md, or your own file; equal on all ranks; None: the group's.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or a read-only output.
        InvalidArgumentError: arrays do not fit each other or the group; no such rank or algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "scatter"
    if (chosen := joined(group, name)) is None:
        return None
    root = peer(chosen, src, group_src, "src", 0)
    is_root = root == chosen.own_rank
    target = as_array(tensor, name, writes=True)
    sources = None
    if is_root:
        sources = as_arrays(scatter_list, name, "scatter_list", count=chosen.size())
        _check_like(sources, target, name, "scatter_list")
    elif scatter_list:
        refuse_list(name, "scatter_list", "src", chosen.ranks[root])
    call = CollectiveCall(
        Collective.SCATTER, name, sources, target, async_op, timeout, algorithm, root=root
    )
    return run(chosen, call)


@short_way(Collective.REDUCE_SCATTER, Form.APART, source="input_list", target="output")
def reduce_scatter(
    output: Array,
    input_list: list[Array],
    op: Operator = _SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Combine the ranks' lists item by item, and give each rank its array of the result.

    Args:
        output: filled in with the combination of all ranks' ``input_list[own rank]``.
        input_list: one array per rank, with as many items as that rank's `output`.
        op: how items are combined; see all_reduce.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: of docs/algorithms.md, or your own file; equal on all ranks; None: the group's.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or a read-only output.
        InvalidArgumentError: arrays do not fit each other or the group; no such rank or algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "reduce_scatter"
    if (chosen := joined(group, name)) is None:
        return None
    target = as_array(output, name, writes=True)
    operator = check_operator(op, name)
    sources = as_arrays(input_list, name, "input_list", count=chosen.size())
    check_alike(sources, target, name, "input_list")
    check_items(target, sources[chosen.own_rank].size, name, "output")
    call = CollectiveCall(
        Collective.REDUCE_SCATTER, name, sources, target, async_op, timeout, algorithm, op=operator
    )
    return run(chosen, call)


@short_way(Collective.REDUCE_SCATTER, Form.APART, source="input", target="output")
def reduce_scatter_tensor(
    output: Array,
    input: Array,  # noqa: A002 - torch.distributed's name
    op: Operator = _SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Combine the ranks' arrays item by item, and give each rank its part of the result.

    Args:
        output: filled in; may be this rank's part of `input`.
        input: any shape, with (number of ranks) * `output.size` items.
        op: how items are combined; see all_reduce.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: of docs/algorithms.md, or your own file; equal on all ranks; None: the group's.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or a read-only output.
        InvalidArgumentError: arrays do not fit each other or the group; no such rank or algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "reduce_scatter_tensor"
    if (chosen := joined(group, name)) is None:
        return None
    source, target = as_array(input, name), as_array(output, name, writes=True)
    operator = check_operator(op, name)
    check_alike([source], target, name, "input")
    check_items(source, target.size * chosen.size(), name, "input")
    call = CollectiveCall(
        Collective.REDUCE_SCATTER, name, source, target, async_op, timeout, algorithm, op=operator
    )
    return run(chosen, call)


reduce_scatter_single = reduce_scatter_tensor  # its name since PyTorch 2.13


@short_way(
    Collective.ALL_TO_ALL, Form.APART, source="input_tensor_list", target="output_tensor_list"
)
def all_to_all(
    output_tensor_list: list[Array],
    input_tensor_list: list[Array],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Send an array to each rank and receive one from each.

    Args:
        output_tensor_list: one array per sender, of the size that it sends to this rank; filled in.
        input_tensor_list: one array per receiver.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: of docs/algorithms.md, or your own file; equal on all ranks; None: the group's.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: no list of arrays or CPU tensors, an unsupported dtype, or a read-only
            output.
        InvalidArgumentError: a list does not have one array per rank, dtypes differ, or there is no
            such algorithm.
        MismatchError: a rank is sent another size than it expects, or another operation is called.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "all_to_all"
    if (chosen := joined(group, name)) is None:
        return None
    count = chosen.size()
    sources = as_arrays(input_tensor_list, name, "input_tensor_list", count=count)
    targets = as_arrays(output_tensor_list, name, "output_tensor_list", count=count, writes=True)
    check_alike([*sources, *targets], sources[0], name, "its lists")
    call = CollectiveCall(
        Collective.ALL_TO_ALL, name, sources, targets, async_op, timeout, algorithm, uneven=True
    )
    return run(chosen, call)


@short_way(Collective.ALL_TO_ALL, Form.CUT, source="input", target="output")
def all_to_all_single(
    output: Array,
    input: Array,  # noqa: A002 - torch.distributed's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Send a part of `input` to each rank, and receive a part of `output` from each.

    Args:
        output, input: cut along their first dimension, evenly unless sizes are given.
        output_split_sizes: how much of the first dimension of `output` comes from each rank.
        input_split_sizes: how much of the first dimension of `input` goes to each rank. If one rank
            gives sizes of either kind, all must.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: of docs/algorithms.md, or your own file; equal on all ranks; None: the group's.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or a read-only output.
        InvalidArgumentError: the arrays cannot be cut so, dtypes differ, or no such algorithm.
        MismatchError: a rank is sent another size than it expects, or another operation is called.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "all_to_all_single"
    if (chosen := joined(group, name)) is None:
        return None
    source, target = as_array(input, name), as_array(output, name, writes=True)
    check_alike([target], source, name, "output")
    inputs: Blocks = source
    outputs: Blocks = target
    uneven = bool(output_split_sizes or input_split_sizes)
    if uneven:
        inputs = _cut(source, input_split_sizes, chosen.size(), name, "input")
        outputs = _cut(target, output_split_sizes, chosen.size(), name, "output")
    else:
        check_divides(source, chosen.size(), name, "input")
        check_items(target, source.size, name, "output")
    call = CollectiveCall(
        Collective.ALL_TO_ALL, name, inputs, outputs, async_op, timeout, algorithm, uneven=uneven
    )
    return run(chosen, call)


def _check_like(arrays: list[Array], model: Array, operation: str, name: str) -> None:
    """Check that arrays have the dtype and size of `model`."""
    check_alike(arrays, model, operation, name)
    for index, array in enumerate(arrays):
        check_items(array, model.size, operation, f"{name}[{index}]")


def refuse_list(operation: str, name: str, root: str, rank: int) -> Never:
    """Refuse a list that only the root, the argument of that name, passes."""
    raise InvalidArgumentError(
        f"{operation}: {name} is for {root}={rank} only; pass None on the other ranks"
    )


def _cut(
    array: Array, sizes: Sequence[int] | None, ranks: int, operation: str, name: str
) -> list[Array]:
    """The parts of an array along its first dimension, of the given sizes or evenly."""
    sizes = part_sizes(array, sizes, ranks, operation, name)
    if not array.ndim:
        return [array]
    return [array[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
