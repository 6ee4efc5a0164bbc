"""all_to_all: each rank sends a block to each rank, given as lists of arrays or parts of one array.

Names, arguments and semantics are torch.distributed's. Blocks may differ in length; the sender and
the receiver of each block both state its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from rallypoint.base.collective import Collective
from rallypoint.process_group.calls.call import run
from rallypoint.process_group.calls.short_way import Form, short_way
from rallypoint.process_group.groups.default import Group, joined
from rallypoint.process_group.memory.arrays import (
    Array,
    Blocks,
    as_array,
    as_arrays,
    check_alike,
    check_divides,
    check_items,
    part_sizes,
)
from rallypoint.process_group.work import CollectiveCall, Work


@short_way(
    Collective.ALL_TO_ALL,
    Form.APART,
    source="input_tensor_list",
    target="output_tensor_list",
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
        algorithm: the algorithm to use: a name from docs/algorithms.md, or a file with your own,
            which is verified first. The same on every rank; the group's choice if None.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: an argument is not a list of arrays or CPU tensors, or a dtype is not
            supported, or an output is read-only.
        InvalidArgumentError: a list does not have one array per rank, dtypes differ, or there is no
            such algorithm.
        MismatchError: a rank expects another size than is sent to it, or ranks called different
            operations.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "all_to_all"
    chosen = joined(group, name)
    if chosen is None:
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
        algorithm: the algorithm to use: a name from docs/algorithms.md, or a file with your own,
            which is verified first. The same on every rank; the group's choice if None.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: an argument is not an array or CPU tensor, or a dtype is not supported, or
            the output is read-only.
        InvalidArgumentError: the arrays cannot be cut so, dtypes differ, or there is no such
            algorithm.
        MismatchError: a rank expects another size than is sent to it, or ranks called different
            operations.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "all_to_all_single"
    chosen = joined(group, name)
    if chosen is None:
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


def _cut(
    array: Array, sizes: Sequence[int] | None, ranks: int, operation: str, name: str
) -> list[Array]:
    """The parts of an array along its first dimension, of the given sizes or evenly."""
    sizes = part_sizes(array, sizes, ranks, operation, name)
    ends = np.cumsum(sizes)
    return (
        [array[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        if array.ndim
        else [array]
    )
