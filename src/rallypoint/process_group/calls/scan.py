"""scan: what all_reduce would give if each rank were the last one. Not in torch; MPI has it."""

from __future__ import annotations

from datetime import timedelta

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.call import run
from rallypoint.process_group.groups.default import Group, joined
from rallypoint.process_group.memory.arrays import Array, as_array
from rallypoint.process_group.operators import Operator, check_operator
from rallypoint.process_group.work import Work


def scan(
    tensor: Array,
    op: Operator = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """Combine item by item the arrays of ranks 0 to this one, in place, as MPI_Scan does.

    With 1, 2, 3 on three ranks and SUM, rank 0 gets 1, rank 1 gets 3, rank 2 gets 6. An extension:
    torch.distributed has no such call. Operands are combined in the order of ranks, and in the same
    way each time, so the bits are the same from run to run.

    Args:
        tensor: any shape, writable; the same shape and dtype on every rank.
        op: how items are combined; not AVG, as no two ranks would divide by the same number.
        async_op: return at once; the array must not be touched before the operation is completed.
        timeout: how long it may wait for a peer; the group's unless given.
        algorithm: the one that must serve this call; see all_reduce.

    Returns:
        The operation, if `async_op` is true and this rank is in the group.

    Raises:
        InvalidTypeError: no array or CPU tensor, an unsupported dtype, or read-only; or a backend
            other than the engine serves the group, and has no scan.
        InvalidArgumentError: op is AVG, or there is no such algorithm.
        MismatchError: ranks called different operations, or with other sizes, dtypes, operators or
            algorithms.
        ProgramError: an algorithm of one's own is wrong; with the rank, step and chunk at fault.
        PeerLostError: a rank died or left.
        CollectiveTimeoutError: a rank did not come within the group's timeout.
    """
    chosen = joined(group, "scan")
    if chosen is None:
        return None
    operator = check_operator(op, "scan")
    if operator is ReduceOp.AVG:
        raise InvalidArgumentError(
            "scan: ReduceOp.AVG is not defined here, because each rank combines a different "
            "number of arrays; use SUM, and divide by rank + 1"
        )
    array = as_array(tensor, "scan", writes=True)
    return run(
        chosen,
        Collective.SCAN,
        "scan",
        array,
        array,
        op=operator,
        async_op=async_op,
        timeout=timeout,
        algorithm=algorithm,
    )
