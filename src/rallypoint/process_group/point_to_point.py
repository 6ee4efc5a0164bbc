"""Messages from one rank to another, under torch.distributed's names."""

from __future__ import annotations

import numpy as np

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.communicator import BAD_BUFFER
from rallypoint.process_group.accounts import failure
from rallypoint.process_group.arrays import Array, as_array, describe, is_plain
from rallypoint.process_group.groups import Group, ProcessGroup, joined, peer
from rallypoint.schedule.collective import Collective

_SEND = int(Collective.SEND)


def send(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send an array to a rank; returns when the array may be changed again.

    Messages to a rank are received in the order in which they were sent.

    Raises:
        InvalidArgumentError: `dst` is this rank or none of the group.
        MismatchError: the receiver expects another size, dtype or tag.
        PeerLostError: the receiver died or left.
    """
    chosen = joined(group, "send")
    if chosen is None:
        return
    other = _other(chosen, peer(chosen, dst, group_dst, "dst", None), "dst")
    code = BAD_BUFFER
    if is_plain(tensor):
        code = chosen.run_pair(_SEND, chosen.own_rank, other, tag, tensor)
    if code == BAD_BUFFER:
        items = np.asarray(as_array(tensor, "send"), order="C")
        code = chosen.run_pair(_SEND, chosen.own_rank, other, tag, items)
    if code != 0:
        raise failure(chosen, code, "send", describe(tensor))


def recv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive an array from a rank into `tensor`; raises as send.

    Returns:
        The sender's global rank; -1 if this rank is not in the group.
    """
    chosen = joined(group, "recv")
    if chosen is None:
        return -1
    other = _other(chosen, peer(chosen, src, group_src, "src", None), "src")
    code = BAD_BUFFER
    if is_plain(tensor):
        code = chosen.run_pair(_SEND, other, chosen.own_rank, tag, tensor)
    if code == BAD_BUFFER:
        array = as_array(tensor, "recv", writes=True)
        room = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
        code = chosen.run_pair(_SEND, other, chosen.own_rank, tag, room)
        if code == 0 and room is not array:
            array[...] = room
    if code != 0:
        raise failure(chosen, code, "recv", describe(tensor))
    return chosen.ranks[other]


def _other(group: ProcessGroup, rank: int, name: str) -> int:
    if rank == group.own_rank:
        raise InvalidArgumentError(
            f"{name}={group.ranks[rank]} is this rank itself; name another one"
        )
    return rank
