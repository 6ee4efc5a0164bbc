"""Lists of small arrays, one for each rank: joined into one array, which the engine takes at once.

The general way (`calls.run`) looks at each array in turn, several times, and takes two to three
times as long. Whatever is not plain (strides, other types, many bytes, arrays that differ) is left
to it.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from rallypoint.process_group.arrays import Array
from rallypoint.process_group.calls import SMALL_BYTES, done_at_once
from rallypoint.process_group.groups import ProcessGroup


def collected(
    group: ProcessGroup,
    collective: int,
    operation: str,
    tensor: object,
    blocks: list[Array] | None,
    *,
    root: int = 0,
    algorithm: str | None = None,
) -> bool:
    """Fill in `blocks` with the arrays of all ranks; of a gather, None where nothing comes out.

    Returns False, with nothing done, if it is not so simple. Raises as `calls.run`.
    """
    if blocks is None:
        return done_at_once(
            group, collective, operation, tensor, None, root=root, algorithm=algorithm
        )
    room = _room_for(blocks, tensor, group)
    if room is None or not done_at_once(
        group, collective, operation, tensor, room, root=root, algorithm=algorithm
    ):
        return False
    for block, found in zip(blocks, room, strict=True):
        block[...] = found
    return True


def handed_out(
    group: ProcessGroup,
    collective: int,
    operation: str,
    blocks: list[Array] | None,
    tensor: object,
    *,
    root: int = 0,
    algorithm: str | None = None,
) -> bool:
    """Fill in `tensor` from the root's `blocks`; None on other ranks. Returns as `collected`."""
    room = None
    if blocks is not None:
        room = _room_for(blocks, tensor, group)
        if room is None:
            return False
        for place, block in enumerate(blocks):
            room[place] = block
    return done_at_once(
        group, collective, operation, room, tensor, root=root, algorithm=algorithm, what=tensor
    )


def _room_for(blocks: object, model: object, group: ProcessGroup) -> Array | None:
    """Memory for all blocks, if they are all like `model`, which is plain and small."""
    if (
        type(blocks) is not list
        or len(blocks) != len(group.ranks)
        or type(model) is not ndarray
        or model.nbytes * len(blocks) > SMALL_BYTES
    ):
        return None
    for block in blocks:
        if (
            type(block) is not ndarray
            or block.dtype != model.dtype
            or block.shape != model.shape
            or not block.flags.writeable
        ):
            return None
    return np.empty((len(blocks), *model.shape), model.dtype)
