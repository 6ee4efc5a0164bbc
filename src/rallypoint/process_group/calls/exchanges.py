"""Collectives on one array per rank: all_gather, gather, scatter, reduce_scatter.

Names, arguments and semantics are torch.distributed's. Functions that take a list of arrays allow
blocks of different lengths if every rank knows all lengths (all_gather, reduce_scatter). Functions
that take one large array store the ranks' blocks one after the other.
"""

from __future__ import annotations

from datetime import timedelta

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.call import run
from rallypoint.process_group.calls.short_way import Form, short_way
from rallypoint.process_group.groups.default import Group, joined, peer
from rallypoint.process_group.memory.arrays import (
    Array,
    as_array,
    as_arrays,
    check_alike,
    check_items,
)
from rallypoint.process_group.operators import Operator, check_operator
from rallypoint.process_group.work import CollectiveCall, Work

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
        algorithm: the algorithm to use: a name from docs/algorithms.md, or a file with your own,
            which is verified first. The same on every rank; the group's choice if None.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: an argument is not an array or CPU tensor, or its dtype is not supported,
            or an output is read-only.
        InvalidArgumentError: arrays do not fit each other or the group, or there is no such rank or
            algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "all_gather"
    chosen = joined(group, name)
    if chosen is None:
        return None
    source = as_array(tensor, name)
    targets = as_arrays(tensor_list, name, "tensor_list", count=chosen.size(), writes=True)
    check_alike(targets, source, name, "tensor_list")
    place = chosen.own_rank
    check_items(targets[place], source.size, name, f"tensor_list[{place}]")
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
        algorithm: the algorithm to use: a name from docs/algorithms.md, or a file with your own,
            which is verified first. The same on every rank; the group's choice if None.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: an argument is not an array or CPU tensor, or its dtype is not supported,
            or an output is read-only.
        InvalidArgumentError: arrays do not fit each other or the group, or there is no such rank or
            algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "all_gather_into_tensor"
    chosen = joined(group, name)
    if chosen is None:
        return None
    source, target = as_array(input_tensor, name), as_array(output_tensor, name, writes=True)
    check_alike([target], source, name, "output_tensor")
    check_items(target, source.size * chosen.size(), name, "output_tensor")
    call = CollectiveCall(Collective.ALL_GATHER, name, source, target, async_op, timeout, algorithm)
    return run(chosen, call)


all_gather_single = all_gather_into_tensor  # its name since PyTorch 2.13


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
        algorithm: the algorithm to use: a name from docs/algorithms.md, or a file with your own,
            which is verified first. The same on every rank; the group's choice if None.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: an argument is not an array or CPU tensor, or its dtype is not supported,
            or an output is read-only.
        InvalidArgumentError: arrays do not fit each other or the group, or there is no such rank or
            algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "gather"
    chosen = joined(group, name)
    if chosen is None:
        return None
    root = peer(chosen, dst, group_dst, "dst", 0)
    is_root = root == chosen.own_rank
    source = as_array(tensor, name)
    targets: list[Array] = []
    if is_root:
        targets = as_arrays(gather_list, name, "gather_list", count=chosen.size(), writes=True)
        check_alike(targets, source, name, "gather_list")
        for index, target in enumerate(targets):
            check_items(target, source.size, name, f"gather_list[{index}]")
    elif gather_list:
        _refuse_list(name, "gather_list", "dst", chosen.ranks[root])
    call = CollectiveCall(
        Collective.GATHER, name, source, targets or None, async_op, timeout, algorithm, root=root
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
        algorithm: the algorithm to use: a name from docs/algorithms.md, or a file with your own,
            which is verified first. The same on every rank; the group's choice if None.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: an argument is not an array or CPU tensor, or its dtype is not supported,
            or an output is read-only.
        InvalidArgumentError: arrays do not fit each other or the group, or there is no such rank or
            algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "scatter"
    chosen = joined(group, name)
    if chosen is None:
        return None
    root = peer(chosen, src, group_src, "src", 0)
    is_root = root == chosen.own_rank
    target = as_array(tensor, name, writes=True)
    sources: list[Array] = []
    if is_root:
        sources = as_arrays(scatter_list, name, "scatter_list", count=chosen.size())
        check_alike(sources, target, name, "scatter_list")
        for index, source in enumerate(sources):
            check_items(source, target.size, name, f"scatter_list[{index}]")
    elif scatter_list:
        _refuse_list(name, "scatter_list", "src", chosen.ranks[root])
    call = CollectiveCall(
        Collective.SCATTER, name, sources or None, target, async_op, timeout, algorithm, root=root
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
        algorithm: the algorithm to use: a name from docs/algorithms.md, or a file with your own,
            which is verified first. The same on every rank; the group's choice if None.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: an argument is not an array or CPU tensor, or its dtype is not supported,
            or an output is read-only.
        InvalidArgumentError: arrays do not fit each other or the group, or there is no such rank or
            algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "reduce_scatter"
    chosen = joined(group, name)
    if chosen is None:
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
        algorithm: the algorithm to use: a name from docs/algorithms.md, or a file with your own,
            which is verified first. The same on every rank; the group's choice if None.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: an argument is not an array or CPU tensor, or its dtype is not supported,
            or an output is read-only.
        InvalidArgumentError: arrays do not fit each other or the group, or there is no such rank or
            algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "reduce_scatter_tensor"
    chosen = joined(group, name)
    if chosen is None:
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


def _refuse_list(operation: str, name: str, root: str, rank: int) -> None:
    raise InvalidArgumentError(
        f"{operation}: {name} is for {root}={rank} only; pass None on the other ranks"
    )
