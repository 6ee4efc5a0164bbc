"""Collectives on one array: all_reduce, reduce, broadcast, and the barriers.

Names, arguments and semantics are torch.distributed's; arrays are NumPy arrays or CPU tensors of
PyTorch of any shape. A contiguous NumPy array goes straight to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from rallypoint.base.errors import CollectiveTimeoutError, StoreTimeoutError
from rallypoint.engine.communicator import BAD_BUFFER, ReduceOp
from rallypoint.process_group.accounts import failure
from rallypoint.process_group.arrays import Array, as_array, describe, is_plain
from rallypoint.process_group.calls import check_operator, refuse_async, run
from rallypoint.process_group.groups import Group, ProcessGroup, joined, peer
from rallypoint.process_group.init import check_timeout
from rallypoint.schedule.collective import Collective

_SUM = ReduceOp.SUM
_ALL_REDUCE = int(Collective.ALL_REDUCE)
_BROADCAST = int(Collective.BROADCAST)
_BARRIER = int(Collective.BARRIER)
_NOTHING = np.empty(0, np.float32)
_GRACE = timedelta(seconds=1)  # for a verdict that is on its way


def all_reduce(
    tensor: Array, op: ReduceOp = _SUM, group: Group = None, async_op: bool = False
) -> None:
    """Combine the arrays of all ranks item by item, in place, with equal bits on each rank.

    Args:
        tensor: any shape, writable; the same shape and dtype on every rank.
        op: how items are combined.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or read-only.
        MismatchError: ranks called different operations, or with other sizes, dtypes or operators.
        PeerLostError: a rank died or left.
        CollectiveTimeoutError: a rank did not come within the group's timeout.
    """
    chosen = joined(group, "all_reduce")
    if chosen is None:
        return
    if async_op:
        refuse_async()
    if type(op) is ReduceOp and is_plain(tensor):
        code = chosen.run(_ALL_REDUCE, op, 0, tensor, tensor)
        if code == 0:
            return
        if code > 0:
            raise failure(chosen, code, "all_reduce", describe(tensor), op=op)
    array = as_array(tensor, "all_reduce", writes=True)
    operator = check_operator(op, array, "all_reduce")
    run(chosen, Collective.ALL_REDUCE, "all_reduce", [array], [array], op=operator)


def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp = _SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> None:
    """Combine the arrays of all ranks item by item into the array of rank `dst`.

    The arrays of the other ranks stay as they are. Raises as all_reduce.
    """
    chosen = joined(group, "reduce")
    if chosen is None:
        return
    root = peer(chosen, dst, group_dst, "dst", None)
    if async_op:
        refuse_async()
    is_root = root == chosen.own_rank
    array = as_array(tensor, "reduce", writes=is_root)
    operator = check_operator(op, array, "reduce")
    outputs = [array] if is_root else []
    run(chosen, Collective.REDUCE, "reduce", [array], outputs, op=operator, root=root)


def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> None:
    """Copy the array of rank `src` into the arrays of all ranks; raises as all_reduce."""
    chosen = joined(group, "broadcast")
    if chosen is None:
        return
    root = peer(chosen, src, group_src, "src", None)
    if async_op:
        refuse_async()
    if is_plain(tensor):
        code = chosen.run(_BROADCAST, 0, root, tensor, tensor)
        if code == 0:
            return
        if code != BAD_BUFFER:
            raise failure(chosen, code, "broadcast", describe(tensor), root=root)
    is_root = root == chosen.own_rank
    array = as_array(tensor, "broadcast", writes=not is_root)
    if not array.flags.writeable:
        array = array.copy()  # the engine may write the same items again
    inputs = [array] if is_root else []
    run(chosen, Collective.BROADCAST, "broadcast", inputs, [array], root=root)


def barrier(
    group: Group = None, async_op: bool = False, device_ids: Sequence[int] | None = None
) -> None:
    """Wait until all ranks of the group have come here; raises as all_reduce.

    `device_ids` is accepted for torch's sake; there are no devices.
    """
    chosen = joined(group, "barrier")
    if chosen is None:
        return
    if async_op:
        refuse_async()
    code = chosen.run(_BARRIER, 0, 0, _NOTHING, _NOTHING)
    if code != 0:
        raise failure(chosen, code, "barrier", "")


def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks of the group have come here; after `timeout`, say who has not.

    Ranks meet at the store, so that the group can still be used after a failure. All ranks that
    have come get the same error, which names all that have not, whatever `wait_all_ranks` says.

    Raises:
        CollectiveTimeoutError: some ranks did not come.
    """
    chosen = joined(group, "monitored_barrier")
    if chosen is None:
        return
    wait = check_timeout(timeout, chosen.timeout)
    store, count = chosen.world.store, chosen.counts["monitored_barrier"]
    chosen.counts["monitored_barrier"] += 1
    prefix = f"{chosen.world.prefix}/monitored_barrier/{chosen.group_name}"
    verdict = f"{prefix}/{count}/verdict"
    store.set(f"{prefix}/{count}/{chosen.own_rank}", "")
    if chosen.own_rank > 0:
        try:
            store.wait([verdict], wait + _GRACE)
        except StoreTimeoutError:
            raise _not_there(chosen, [0], wait) from None
        missing = store.get(verdict).decode()
    else:
        missing = _missing(chosen, f"{prefix}/{count}", wait)
        store.set(verdict, missing)
        if count and not missing:  # all have read the last verdict
            for name in ("verdict", *range(chosen.size())):
                store.delete_key(f"{prefix}/{count - 1}/{name}")
    if missing:
        raise _not_there(chosen, [int(rank) for rank in missing.split(",")], wait)


def _missing(group: ProcessGroup, prefix: str, wait: timedelta) -> str:
    """The ranks in the group that do not come in time, separated by commas."""
    keys = {rank: f"{prefix}/{rank}" for rank in range(group.size())}
    store = group.world.store
    try:
        store.wait(list(keys.values()), wait)
    except StoreTimeoutError:
        return ",".join(str(rank) for rank, key in keys.items() if not store.check([key]))
    return ""


def _not_there(group: ProcessGroup, missing: list[int], wait: timedelta) -> CollectiveTimeoutError:
    ranks = [group.ranks[rank] for rank in missing]
    return CollectiveTimeoutError(
        f"monitored_barrier: after {wait.total_seconds():g} s, these of the {group.size()} ranks "
        f"had not come: {', '.join(map(str, ranks))}; see what they are doing",
        rank=ranks[0],
        operation="monitored_barrier",
    )
