"""Collectives on one array: all_reduce, reduce, broadcast, and the barriers.

Names, arguments and semantics are torch.distributed's; arrays are NumPy arrays or CPU tensors of
PyTorch of any shape. A contiguous NumPy array goes straight to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
from numpy import ndarray

from rallypoint.base.errors import CollectiveTimeoutError, StoreTimeoutError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.accounts import failure
from rallypoint.process_group.arrays import Array, as_array, describe, is_plain
from rallypoint.process_group.calls import done_at_once, run
from rallypoint.process_group.groups import Group, ProcessGroup, joined, peer
from rallypoint.process_group.init import check_timeout
from rallypoint.process_group.operators import Operator, check_operator
from rallypoint.process_group.work import Work
from rallypoint.schedule.collective import Collective

_SUM, _PREMUL_SUM = ReduceOp.SUM, ReduceOp.PREMUL_SUM
_ALL_REDUCE = int(Collective.ALL_REDUCE)  # 0, so that a variant of it is the variant's number
_BROADCAST = int(Collective.BROADCAST)
_REDUCE = int(Collective.REDUCE)
_BARRIER = int(Collective.BARRIER)
_NOTHING = np.empty(0, np.float32)
_GRACE = timedelta(seconds=1)  # for a verdict that is on its way


def all_reduce(
    tensor: Array,
    op: Operator = _SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Combine the arrays of all ranks item by item, in place, with equal bits on each rank.

    Args:
        tensor: any shape, writable; the same shape and dtype on every rank.
        op: how items are combined. AVG rounds integers towards zero; float16 and bfloat16 are
            combined as float32 and rounded once.
        async_op: return at once; the array must not be touched before the operation is completed.
        timeout: how long it may wait for a peer; the group's unless given.
        algorithm: the one that must serve this call: a name of docs/algorithms.md, or a file of
            one's own, which is proved first. The same on every rank; the group's choice unless
            given.

    Returns:
        The operation, if `async_op` is true and this rank is in the group.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or read-only.
        MismatchError: ranks called different operations, or with other sizes, dtypes, operators or
            algorithms.
        InvalidArgumentError: there is no such algorithm for it.
        ProgramError: an algorithm of one's own is wrong; with the rank, step and chunk at fault.
        PeerLostError: a rank died or left.
        CollectiveTimeoutError: a rank did not come within the group's timeout.
    """
    chosen = joined(group, "all_reduce")
    if chosen is None:
        return None
    if (
        not async_op
        and timeout is None
        and type(op) is ReduceOp
        and op is not _PREMUL_SUM
        and is_plain(tensor)
    ):
        try:  # a look-up in place of a call: of half a microsecond every part shows
            kind = _ALL_REDUCE if algorithm is None else chosen.variants[algorithm]
        except KeyError:
            kind = chosen.algorithms.variant(algorithm)
        code = chosen.run(kind, op, 0, tensor, tensor)
        if code == 0:
            return None
        if code > 0:
            raise failure(chosen, code, "all_reduce", describe(tensor), op=op, variant=kind)
    array = as_array(tensor, "all_reduce", writes=True)
    return run(
        chosen,
        Collective.ALL_REDUCE,
        "all_reduce",
        array,
        array,
        op=check_operator(op, "all_reduce"),
        async_op=async_op,
        timeout=timeout,
        algorithm=algorithm,
    )


def reduce(
    tensor: Array,
    dst: int | None = None,
    op: Operator = _SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Combine the arrays of all ranks item by item into the array of rank `dst`.

    The arrays of the other ranks stay as they are. Raises as all_reduce.
    """
    chosen = joined(group, "reduce")
    if chosen is None:
        return None
    root = peer(chosen, dst, group_dst, "dst", None)
    is_root = root == chosen.own_rank
    if not async_op and timeout is None:
        output = tensor if is_root else None
        if done_at_once(
            chosen, _REDUCE, "reduce", tensor, output, op=op, root=root, algorithm=algorithm
        ):
            return None
    array = as_array(tensor, "reduce", writes=is_root)
    return run(
        chosen,
        Collective.REDUCE,
        "reduce",
        array,
        array if is_root else None,
        op=check_operator(op, "reduce"),
        root=root,
        async_op=async_op,
        timeout=timeout,
        algorithm=algorithm,
    )


def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Copy the array of rank `src` into the arrays of all ranks; raises as all_reduce."""
    chosen = joined(group, "broadcast")
    if chosen is None:
        return None
    root = peer(chosen, src, group_src, "src", None)
    if not async_op and timeout is None and (type(tensor) is ndarray or is_plain(tensor)):
        variant = 0 if algorithm is None else chosen.algorithms.variant(algorithm)
        code = chosen.run(_BROADCAST + variant, 0, root, tensor, tensor)
        if code == 0:
            return None
        if code > 0:
            what = describe(tensor)
            raise failure(chosen, code, "broadcast", what, root=root, variant=variant)
    is_root = root == chosen.own_rank
    array = as_array(tensor, "broadcast", writes=not is_root)
    if not array.flags.writeable:
        array = array.copy()  # the engine may write the same items again
    return run(
        chosen,
        Collective.BROADCAST,
        "broadcast",
        array if is_root else None,
        array,
        root=root,
        async_op=async_op,
        timeout=timeout,
        algorithm=algorithm,
    )


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Wait until all ranks of the group have come here; raises as all_reduce.

    `device_ids` is accepted for torch's sake; there are no devices.
    """
    chosen = joined(group, "barrier")
    if chosen is None:
        return None
    if async_op or timeout is not None or chosen.deferred is not None:
        return run(
            chosen,
            Collective.BARRIER,
            "barrier",
            _NOTHING,
            _NOTHING,
            async_op=async_op,
            timeout=timeout,
            algorithm=algorithm,
        )
    variant = 0 if algorithm is None else chosen.algorithms.variant(algorithm)
    code = chosen.run(_BARRIER + variant, 0, 0, None, None)
    if code != 0:
        raise failure(chosen, code, "barrier", "", variant=variant)
    return None


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
