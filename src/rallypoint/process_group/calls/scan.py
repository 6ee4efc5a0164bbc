"""scan: each rank gets what all_reduce of the ranks up to it gives. Not in torch; MPI has it."""

from __future__ import annotations

from datetime import timedelta

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.call import run
from rallypoint.process_group.groups.default import Group, joined
from rallypoint.process_group.memory.arrays import Array, as_array
from rallypoint.process_group.operators import Operator, check_operator
from rallypoint.process_group.work import CollectiveCall, Work


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

    With 1, 2, 3 on three ranks and SUM, rank 0 gets 1, rank 1 gets 3, rank 2 gets 6. This is an
    extension: torch.distributed has no such call. Operands are combined in the order of ranks, and
    in the same way each time, so the bits are the same from run to run.

    Args:
        tensor: any shape, writable; the same shape and dtype on every rank.
        op: how items are combined; not AVG, because each rank would divide by a different number.
        async_op: return at once; do not touch the array before the operation is completed.
        timeout: how long to wait for a peer; the group's timeout if None.
        algorithm: the algorithm to use: a name from docs/algorithms.md, or a file with your own,
            which is verified first. The same on every rank; the group's choice if None.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: `tensor` is not an array or CPU tensor, or its dtype is not supported, or
            it is read-only; or the group's backend is not the engine, and has no scan.
        InvalidArgumentError: op is AVG, or there is no such algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes, operators
            or algorithms.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    name = "scan"
    chosen = joined(group, name)
    if chosen is None:
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
