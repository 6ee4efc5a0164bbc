"""Collectives on one array: all_reduce, reduce, broadcast, scan, and the barriers.

Names, arguments and semantics are torch.distributed's, except for scan, which is MPI's. Arrays are
NumPy arrays or PyTorch tensors of any shape. A contiguous NumPy array goes straight to the engine.
Coalesced calls are collectives that start one after the other and are waited for together; their
arrays are not packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np

from rallypoint.base.collective import Collective
from rallypoint.base.errors import CollectiveTimeoutError, InvalidArgumentError, StoreTimeoutError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.arrays import Array, as_array
from rallypoint.process_group.calls.call import Form, run, short_way
from rallypoint.process_group.groups.default import Group, check_timeout, joined, peer, resolve
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.operators import Operator, check_operator
from rallypoint.process_group.work import CollectiveCall, ManyWorks, Work, ended_on_error, together
from rallypoint.store.store import Store

_SUM = ReduceOp.SUM
_NOTHING = np.empty(0, np.uint8)
_GRACE = timedelta(seconds=1)  # for a verdict that may be on its way
_AT_ONCE = timedelta(0)
_ALL = "all"  # a verdict of monitored_barrier: no rank is missing


@short_way(Collective.ALL_REDUCE, Form.IN_PLACE, source="tensor")
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

    All ranks must call the collectives of a group in the same order, so threads that call them
    concurrently need a group each.

    Args:
        tensor: any shape, writable; the same shape and dtype on every rank.
        op: how items are combined. AVG rounds integers towards zero; float16 and bfloat16 are
            combined as float32 and rounded once.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: the algorithm to use: a name from docs/algorithms.md, or a file with your own,
            which is verified first. The same on every rank; the group's choice if None.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: `tensor` is no array or CPU tensor, of an unsupported dtype, or read-only.
        MismatchError: ranks differ in operation, size, dtype, operator or algorithm.
        InvalidArgumentError: there is no such algorithm for this operation.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "all_reduce"
    if (chosen := joined(group, name)) is None:
        return None
    array = as_array(tensor, name, writes=True)
    operator = check_operator(op, name)
    call = CollectiveCall(
        Collective.ALL_REDUCE, name, array, array, async_op, timeout, algorithm, op=operator
    )
    return run(chosen, call)


def all_reduce_coalesced(
    tensors: Sequence[Array] | Array,
    op: Operator = _SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """all_reduce of several arrays, or of one.

    Args:
        tensors: one array or a list of them, each combined in place; the same shapes and dtypes on
            every rank.
        op: how items are combined; see all_reduce.

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
    if joined(group, "all_reduce_coalesced") is None:
        return None
    works: list[Work | None] = []
    with ended_on_error(works):
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            works.append(all_reduce(tensor, op, group, True, timeout=timeout, algorithm=algorithm))
    return together(works, async_op)


@short_way(Collective.REDUCE, Form.ONTO_ROOT, source="tensor")
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

    The arrays of the other ranks are not changed.

    Args:
        tensor: any shape; the same shape and dtype on every rank; writable on `dst`.
        dst, group_dst: the rank that gets the result: its global rank, or its rank in the group.
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
    name = "reduce"
    if (chosen := joined(group, name)) is None:
        return None
    root = peer(chosen, dst, group_dst, "dst", None)
    is_root = root == chosen.own_rank
    array = as_array(tensor, name, writes=is_root)
    target = array if is_root else None
    operator = check_operator(op, name)
    call = CollectiveCall(
        Collective.REDUCE, name, array, target, async_op, timeout, algorithm, operator, root
    )
    return run(chosen, call)


@short_way(Collective.BROADCAST, Form.IN_PLACE, source="tensor")
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
    """Copy the array of rank `src` into the arrays of all ranks.

    Args:
        tensor: any shape; the same size and dtype on every rank; read on `src`, filled in
            elsewhere.
        src, group_src: the rank that sends: its global rank, or its rank in the group.
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
    name = "broadcast"
    if (chosen := joined(group, name)) is None:
        return None
    root = peer(chosen, src, group_src, "src", None)
    is_root = root == chosen.own_rank
    array = as_array(tensor, name, writes=not is_root)
    if not array.flags.writeable:
        array = array.copy()  # the engine may write the same items again
    source = array if is_root else None
    call = CollectiveCall(
        Collective.BROADCAST, name, source, array, async_op, timeout, algorithm, root=root
    )
    return run(chosen, call)


def scan(
    tensor: Array,
    op: Operator = _SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Combine item by item the arrays of ranks 0 to this one, in place, as MPI_Scan does.

    With 1, 2, 3 on three ranks and SUM, rank 0 gets 1, rank 1 gets 3, rank 2 gets 6. This is an
    extension: torch.distributed has no such call. Operands are combined in the order of ranks, and
    in the same way each time, so the bits are the same from run to run.

    Args:
        tensor: any shape, writable; the same shape and dtype on every rank.
        op: how items are combined; not AVG, because each rank would divide by a different number.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: of docs/algorithms.md, or your own file; equal on all ranks; None: the group's.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: `tensor` is not an array or CPU tensor, or its dtype is not supported, or
            it is read-only; or the group's backend is not the engine, and has no scan.
        InvalidArgumentError: op is AVG, or there is no such algorithm.
        MismatchError: ranks differ in operation, size, dtype, operator or algorithm.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "scan"
    if (chosen := joined(group, name)) is None:
        return None
    operator = check_operator(op, name)
    if operator is ReduceOp.AVG:
        raise InvalidArgumentError(
            "scan: ReduceOp.AVG is not defined here, because each rank combines a different "
            "number of arrays; use SUM, and divide by rank + 1"
        )
    array = as_array(tensor, name, writes=True)
    call = CollectiveCall(
        Collective.SCAN, name, array, array, async_op, timeout, algorithm, op=operator
    )
    return run(chosen, call)


@short_way(Collective.BARRIER, Form.NOTHING)
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    *,
    algorithm: str | None = None,
) -> Work | None:
    """Wait until all ranks of the group have called barrier.

    `device_ids` is accepted for compatibility with torch and ignored.

    Raises:
        MismatchError: ranks called different operations.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "barrier"
    if (chosen := joined(group, name)) is None:
        return None
    call = CollectiveCall(
        Collective.BARRIER, name, _NOTHING, _NOTHING, async_op, timeout, algorithm
    )
    return run(chosen, call)


@contextmanager
def _coalescing_manager(
    group: Group = None, device: object = None, async_ops: bool = False
) -> Iterator[ManyWorks]:
    """Run the collectives of a group in a ``with`` block side by side.

    Within the block they return at once, and their arrays must not be touched. They are completed
    at the end of the block or, with `async_ops`, when the manager's `wait()` returns. Unlike
    torch's, it accepts any mixture of collectives and operators. `device` is accepted for
    compatibility with torch and ignored.

        with dist._coalescing_manager():
            for array in arrays:
                dist.all_reduce(array)

    Raises:
        InvalidArgumentError: it is nested in another one of the same group.
    """
    chosen = resolve(group)
    if chosen.deferred is not None:
        raise InvalidArgumentError("a _coalescing_manager of this group is already open")
    manager = ManyWorks([])
    chosen.defer(manager.works)
    try:
        yield manager
    finally:
        chosen.deferred = None
        if not chosen.is_destroyed:  # it may be, in the block; then it refuses calls
            chosen.bind_calls()
    if not async_ops:
        manager.wait()


def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks of the group have called this; after `timeout`, name the missing ones.

    The ranks synchronize through the store, so the group remains usable after a failure. All
    waiting ranks report the same missing ranks: those that were missing when the first of them
    timed out. With a timeout of 0, rank 0 only checks which ranks have already arrived.

    Args:
        timeout: how long to wait; the group's timeout if None.
        wait_all_ranks: as in torch: the message starts with all missing ranks, not only the first.

    Raises:
        CollectiveTimeoutError: some ranks did not arrive in time.
    """
    if (chosen := joined(group, "monitored_barrier")) is None:
        return
    wait = _AT_ONCE if timeout == _AT_ONCE else check_timeout(timeout, chosen.timeout)
    store, count = chosen.world.store, chosen.counts["monitored_barrier"]
    chosen.counts["monitored_barrier"] += 1
    prefix = f"{chosen.world.prefix}/monitored_barrier/{chosen.group_name}"
    came = [f"{prefix}/{count}/{rank}" for rank in range(chosen.size())]
    verdict = f"{prefix}/{count}/verdict"
    store.set(came[chosen.own_rank], "")
    awaited, patience = (came, wait) if chosen.own_rank == 0 else ([verdict], wait + _GRACE)
    is_late = _are_missing(store, awaited, patience)
    if is_late or chosen.own_rank == 0:
        missing = [str(rank) for rank, key in enumerate(came) if is_late and not store.check([key])]
        # The verdict that was stored first counts.
        stored = store.compare_set(verdict, "", ",".join(missing) or _ALL).decode()
    else:
        stored = store.get(verdict).decode()
    if stored != _ALL:
        raise _not_there(chosen, [int(rank) for rank in stored.split(",")], wait, wait_all_ranks)
    if count and chosen.own_rank == 0:  # all have read the last verdict
        for name in ("verdict", *range(chosen.size())):
            store.delete_key(f"{prefix}/{count - 1}/{name}")


def _are_missing(store: Store, keys: list[str], wait: timedelta) -> bool:
    """Whether some of the keys are not set in time."""
    if wait == _AT_ONCE:
        return not store.check(keys)
    try:
        store.wait(keys, wait)
    except StoreTimeoutError:
        return True
    return False


def _not_there(
    group: ProcessGroup, missing: list[int], wait: timedelta, tells_all: bool
) -> CollectiveTimeoutError:
    """The error, in torch's words, which programs look for, and in ours."""
    ranks = [group.ranks[rank] for rank in missing]
    listed, own = ", ".join(map(str, ranks)), group.ranks[group.own_rank]
    seconds = f"{wait.total_seconds():g} s"
    who = f"Ranks {listed}" if tells_all else f"Rank {ranks[0]}"
    text = f"{who} failed to pass monitoredBarrier in {seconds}"
    if group.own_rank == 0 and wait == _AT_ONCE:
        text = f"Rank {own} timed out in monitoredBarrier after {seconds}"
    elif group.own_rank > 0 and group.own_rank not in missing:
        text = (
            f"Rank {own} successfully reached monitoredBarrier, but received errors while waiting "
            f"for send/recv from rank {group.ranks[0]}: {text}"
        )
    return CollectiveTimeoutError(
        f"monitored_barrier: {text}; ranks missing after {seconds}: {listed} (of "
        f"{group.size()}); check what they are doing",
        rank=ranks[0],
        operation="monitored_barrier",
    )
