"""Collectives on Python objects, under torch.distributed's names.

Objects are pickled, and exchanged only between the ranks of one group. Unpickling runs code that
the sender chose, so every rank must trust every other; ranks that run the same program do so
anyway. Nothing from outside the group is unpickled.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.arrays import Array
from rallypoint.process_group.calls.call import run
from rallypoint.process_group.calls.collectives import broadcast
from rallypoint.process_group.calls.exchanges import (
    all_gather,
    all_gather_into_tensor,
    refuse_list,
    scatter,
)
from rallypoint.process_group.calls.point_to_point import recv, send
from rallypoint.process_group.groups.default import Group, joined, peer
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.work import CollectiveCall


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: object = None,
    group_src: int | None = None,
) -> None:
    """Replace the objects in the lists of all ranks by those of rank `src` (0 unless given).

    Args:
        object_list: of the same length on every rank.
        device: accepted for compatibility with torch and ignored.

    Raises:
        InvalidArgumentError: a list has the wrong length, or there is no such rank.
        MismatchError: ranks called different operations.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
        Exception: pickle's own errors, for an object that it cannot pickle or unpickle.
    """
    if (chosen := _at_once(group, "broadcast_object_list")) is None:
        return
    root = peer(chosen, src, group_src, "src", 0)
    is_root = chosen.own_rank == root
    pickled = [_pickle(item) for item in object_list] if is_root else []
    sizes = _sizes(pickled) if is_root else np.empty(len(object_list), np.int64)
    broadcast(sizes, group=chosen, group_src=root)
    data = _joined(pickled) if is_root else np.empty(int(sizes.sum()), np.uint8)
    broadcast(data, group=chosen, group_src=root)
    if not is_root:
        object_list[:] = _unpickled(data, sizes)


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:  # noqa: ANN401
    """Collect an object of each rank in `object_list`.

    Args:
        object_list: one element for each rank; filled in.
        obj: this rank's object; any that pickle takes.

    Raises:
        InvalidArgumentError: a list has the wrong length, or there is no such rank.
        MismatchError: ranks called different operations.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
        Exception: pickle's own errors, for an object that it cannot pickle or unpickle.
    """
    if (chosen := _at_once(group, "all_gather_object")) is None:
        return
    ranks = chosen.size()
    _check_list(object_list, ranks, "all_gather_object", "object_list")
    data = _pickle(obj)
    sizes = np.empty(ranks, np.int64)
    all_gather_into_tensor(sizes, _sizes([data]), chosen)
    gathered = [np.empty(size, np.uint8) for size in sizes]
    all_gather(gathered, data, chosen)
    object_list[:] = [pickle.loads(part.data) for part in gathered]


def gather_object(
    obj: Any,  # noqa: ANN401
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Collect an object of each rank on rank `dst`.

    Args:
        object_gather_list: on `dst` a list with one element for each rank; None on the other ranks.

    Raises:
        InvalidArgumentError: a list has the wrong length, or there is no such rank.
        MismatchError: ranks called different operations.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
        Exception: pickle's own errors, for an object that it cannot pickle or unpickle.
    """
    name = "gather_object"
    if (chosen := _at_once(group, name)) is None:
        return
    root = peer(chosen, dst, group_dst, "dst", 0)
    if root != chosen.own_rank:
        if object_gather_list:
            refuse_list(name, "object_gather_list", "dst", chosen.ranks[root])
        object_gather_list = [None] * chosen.size()
    if object_gather_list is None:
        raise InvalidArgumentError("gather_object: the dst rank must pass object_gather_list")
    _check_list(object_gather_list, chosen.size(), name, "object_gather_list")
    data = _pickle(obj)
    sizes = np.empty(chosen.size(), np.int64)
    all_gather_into_tensor(sizes, _sizes([data]), chosen)
    is_root = root == chosen.own_rank
    parts = [np.empty(size, np.uint8) for size in sizes] if is_root else None
    call = CollectiveCall(Collective.GATHER, name, data, parts, root=root, uneven=True)
    run(chosen, call)
    if parts:
        object_gather_list[:] = [pickle.loads(part.data) for part in parts]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Give each rank its object from a list on rank `src` (0 unless given).

    Args:
        scatter_object_output_list: its first element becomes this rank's object.
        scatter_object_input_list: on `src` one object for each rank; ignored on the other ranks.

    Raises:
        InvalidArgumentError: a list has the wrong length, or there is no such rank.
        MismatchError: ranks called different operations.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
        Exception: pickle's own errors, for an object that it cannot pickle or unpickle.
    """
    if (chosen := _at_once(group, "scatter_object_list")) is None:
        return
    root = peer(chosen, src, group_src, "src", 0)
    if not scatter_object_output_list:
        raise InvalidArgumentError(
            "scatter_object_list: scatter_object_output_list needs an element to receive the object"
        )
    is_root = root == chosen.own_rank
    pickled: list[Array] = []
    if is_root:
        objects = scatter_object_input_list or []
        _check_list(objects, chosen.size(), "scatter_object_list", "scatter_object_input_list")
        pickled = [_pickle(item) for item in objects]
    size = np.empty(1, np.int64)
    sizes = [_sizes([data]) for data in pickled]
    scatter(size, sizes if is_root else None, group=chosen, group_src=root)
    mine = np.empty(size[0], np.uint8)
    name = "scatter_object_list"
    call = CollectiveCall(Collective.SCATTER, name, pickled or None, mine, root=root, uneven=True)
    run(chosen, call)
    scatter_object_output_list[0] = pickle.loads(mine.data)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: object = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send the objects of a list to a rank, which must receive as many.

    `device` and `use_batch` are accepted for compatibility with torch and ignored.

    Raises:
        InvalidArgumentError: `dst` is this rank or not a rank of the group.
        DeadlockError: the receiver waits for this rank, so neither can make progress.
        PeerLostError: the receiver died or left the group.
        CollectiveTimeoutError: the objects were not received within the group's timeout.
    """
    if (chosen := joined(group, "send_object_list")) is None:
        return
    chosen = chosen.for_objects
    pickled = [_pickle(item) for item in object_list]
    send(_sizes(pickled), dst, chosen, group_dst=group_dst)
    send(_joined(pickled), dst, chosen, group_dst=group_dst)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: object = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive objects into a list, replacing those in it.

    `device` and `use_batch` are accepted for compatibility with torch and ignored.

    Returns:
        The sender's global rank; -1 if this rank is not in the group.

    Raises:
        InvalidArgumentError: `src` is this rank or not a rank of the group.
        MismatchError: the sender sent another number of objects.
        DeadlockError: the sender waits for this rank, so neither can make progress.
        PeerLostError: the sender died or left the group.
        CollectiveTimeoutError: nothing was sent within the group's timeout.
    """
    if (chosen := joined(group, "recv_object_list")) is None:
        return -1
    chosen = chosen.for_objects
    sizes = np.empty(len(object_list), np.int64)
    sender = recv(sizes, src, chosen, group_src=group_src)
    data = np.empty(int(sizes.sum()), np.uint8)
    recv(data, sender, chosen)
    object_list[:] = _unpickled(data, sizes)
    return sender


def _pickle(item: object) -> Array:
    return np.frombuffer(pickle.dumps(item, pickle.HIGHEST_PROTOCOL), np.uint8)


def _sizes(pickled: list[Array]) -> Array:
    return np.array([data.size for data in pickled], np.int64)


def _at_once(group: Group, operation: str) -> ProcessGroup | None:
    """`joined`, for calls that need several collectives, each of which depends on the previous."""
    chosen = joined(group, operation)
    if chosen is not None and chosen.deferred is not None:
        raise InvalidArgumentError(
            f"{operation} cannot be coalesced; call it outside of _coalescing_manager"
        )
    return None if chosen is None else chosen.for_objects


def _joined(pickled: list[Array]) -> Array:
    return np.concatenate([np.empty(0, np.uint8), *pickled])


def _unpickled(data: Array, sizes: Array) -> list[Any]:
    pairs = zip(sizes, np.cumsum(sizes), strict=True)
    return [pickle.loads(data[end - size : end].data) for size, end in pairs]


def _check_list(items: list[Any], ranks: int, operation: str, name: str) -> None:
    if not isinstance(items, list) or len(items) != ranks:
        raise InvalidArgumentError(
            f"{operation}: {name} must be a list of {ranks} elements, one for each rank of the "
            "group"
        )
