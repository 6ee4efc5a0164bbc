"""What calls from PyTorch have in common: from its options to the engine, and to a Work.

One dense CPU tensor goes straight to the engine; all else through process_group.calls, which is
also where errors get their words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.accounts import Site, failure
from rallypoint.process_group.arrays import describe
from rallypoint.process_group.calls import Blocks, run
from rallypoint.process_group.groups import ProcessGroup
from rallypoint.process_group.operators import Operator, PremulSum
from rallypoint.process_group.parts import part_sizes
from rallypoint.process_group.work import Called, OneWork
from rallypoint.pytorch.buckets import shared_buckets
from rallypoint.pytorch.devices import Devices
from rallypoint.pytorch.memory import Memory
from rallypoint.pytorch.untraced import untraced
from rallypoint.pytorch.work import DoneWork, RunningWork, joined
from rallypoint.schedule.collective import Collective
from rallypoint.store.store import seconds_of

Tensor = Any  # torch.Tensor, which type checkers do not see
Options = Any  # of torch, a class for each collective
Work = Any  # DoneWork or RunningWork

PREMUL_SUM = int(ReduceOp.PREMUL_SUM)
_UNSET = timedelta(milliseconds=-1)


@untraced
class Calls:
    """How a group makes a call.

    Attributes:
        engine_group: the group as the engine knows it.
        devices: where calls go whose tensors are not on the CPU.
        own_timeout: for each call, if it is another than the group was formed with.
    """

    engine_group: ProcessGroup
    devices: Devices
    own_timeout: timedelta | None = None

    def share_bucket(self, tensor: Tensor) -> None:
        """Have the ranks of this host read a bucket of DDP's, from now on, where it lies."""
        shared_buckets.share(tensor, self.engine_group.communicator)

    def _quick(
        self, kind: int, name: str, tensor: Tensor, opts: Options, *, op: int = 0, root: int = 0
    ) -> Work | None:
        """In place, with the tensor as it is; None if the engine cannot take it so."""
        group = self.engine_group
        timeout = self._timeout(opts)
        if opts.asyncOp:
            held = tensor.detach()  # its memory stays, even if the tensor is given other memory
            timeout_s = -1.0 if timeout is None else seconds_of(timeout)
            submitted = group.communicator.submit(kind, op, root, held, held, timeout_s=timeout_s)
            if isinstance(submitted, int):
                return None
            called = Called(name, tensor, op, root, site=Site.of_caller())
            return RunningWork(OneWork(submitted, group, called, [tensor]), [tensor])
        if timeout is not None:
            return None
        code = group.run(kind, op, root, tensor, tensor)
        if code > 0:
            raise failure(group, code, name, describe(tensor), op=op, root=root)
        return DoneWork((tensor,)) if code == 0 else None

    def _in_place(
        self, collective: Collective, operation: str, tensor: Tensor, opts: Options, root: int = 0
    ) -> Work:
        memory = Memory(operation, moves=not collective.reduces)
        is_root = root == self.engine_group.own_rank
        source: Blocks = None
        target: Blocks = None
        if collective is not Collective.REDUCE or is_root:
            target = memory.writes(tensor, in_place=collective.reduces or is_root)
        if collective is not Collective.BROADCAST or is_root:
            source = memory.reads(tensor) if target is None else target
        return self._run(
            collective,
            operation,
            source,
            target,
            opts,
            op=operator_of(opts.reduceOp) if collective.reduces else None,
            root=root,
            memory=memory,
            returns=[tensor],
        )

    def _run(
        self,
        collective: Collective,
        operation: str,
        inputs: Blocks,
        outputs: Blocks,
        opts: Options,
        *,
        returns: Sequence[Any],
        op: Operator | None = None,
        root: int = 0,
        uneven: bool = False,
        memory: Memory | None = None,
    ) -> Work:
        work = run(
            self.engine_group,
            collective,
            operation,
            inputs,
            outputs,
            op=op,
            root=root,
            uneven=uneven,
            async_op=opts.asyncOp,
            timeout=self._timeout(opts),
        )
        finish = memory.finish if memory is not None and memory.has_copies else None
        if work is not None:
            return RunningWork(work, returns, finish)
        if finish is not None:
            finish()
        return DoneWork(returns)

    def _timeout(self, opts: Options) -> timedelta | None:
        return self.own_timeout if opts.timeout == _UNSET else opts.timeout

    def _of_root(
        self, lists: Sequence[Sequence[Tensor]], opts: Options, operation: str, side: str
    ) -> Sequence[Tensor] | None:
        """The root's tensors, one for each rank; None on the others, which must not give any."""
        if self._rank(opts.rootRank, operation) == self.engine_group.own_rank:
            given: Sequence[Tensor] = only(lists, operation)
            self._check_count(given, operation, side)
            return given
        if lists:
            raise InvalidArgumentError(
                f"{operation}: {side}s are for the root only, rank {opts.rootRank}; pass none here"
            )
        return None

    def _rank(self, rank: int, operation: str) -> int:
        """A root or peer, checked to be a rank of the group."""
        if not 0 <= rank < self.engine_group.size():
            raise InvalidArgumentError(
                f"{operation}: {rank} is not a rank of this group, which has "
                f"{self.engine_group.size()} ranks"
            )
        return rank

    def _check_count(self, tensors: Sequence[Any], operation: str, side: str) -> None:
        if len(tensors) != self.engine_group.size():
            raise InvalidArgumentError(
                f"{operation}: {len(tensors)} {side} tensors for {self.engine_group.size()} ranks; "
                "pass one for each"
            )

    def _parts(
        self, tensor: Tensor, sizes: Sequence[int], operation: str, side: str
    ) -> Sequence[Tensor]:
        """The parts of a tensor along its first dimension, of the given sizes or evenly."""
        sizes = part_sizes(tensor, sizes, self.engine_group.size(), operation, side)
        return tensor.split(sizes) if tensor.dim() else [tensor]


class Begun(list[Any]):
    """Works begun side by side; `whole` is all of them as one."""

    whole: Work


@contextmanager
def side_by_side(opts: Options, outputs: Sequence[Any]) -> Iterator[Begun]:
    """Calls with `opts` in here only begin; at the end all are waited for, if that is asked for."""
    is_async, opts.asyncOp = opts.asyncOp, True
    works = Begun()
    try:
        yield works
    finally:
        opts.asyncOp = is_async
    works.whole = joined(works, outputs)
    if not is_async:
        works.whole.wait()


def check_pairs(outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: str) -> None:
    """Refuse lists of different lengths."""
    if len(outputs) != len(inputs):
        raise InvalidArgumentError(
            f"{operation}: {len(outputs)} output tensors for {len(inputs)} input tensors; pass one "
            "for each"
        )


def operator_of(op: Any) -> Operator:  # noqa: ANN401 - torch's ReduceOp
    """The engine's operator for torch's."""
    code = int(op.op)
    return PremulSum(float(op.factor)) if code == PREMUL_SUM else ReduceOp(code)


def only(tensors: Sequence[Any], operation: str) -> Any:  # noqa: ANN401 - a tensor, or a list of them
    """What PyTorch wraps in a list for the days of several devices in a process."""
    if len(tensors) != 1:
        raise InvalidArgumentError(f"{operation} takes one tensor of a rank, not {len(tensors)}")
    return tensors[0]
