"""The common part of calls from PyTorch: from its options to the engine, and on to a Work.

Each call tries `_at_once` first: dense CPU tensors go directly to the engine, which checks them. A
call that the engine cannot take as it is goes through process_group.calls.call, which also words
the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.call import Blocks, run
from rallypoint.process_group.calls.parts import part_sizes
from rallypoint.process_group.calls.point_to_point import post_message
from rallypoint.process_group.groups.call_errors import CallDetails, Site
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.operators import Operator, PremulSum
from rallypoint.process_group.work import ended_on_error
from rallypoint.pytorch.buckets import shared_buckets
from rallypoint.pytorch.device_groups import DeviceGroups
from rallypoint.pytorch.memory import Memory
from rallypoint.pytorch.tools import untraced
from rallypoint.pytorch.torch_work import DoneWork, RunningWork, joined
from rallypoint.pytorch.versions import factor_of
from rallypoint.store.store import seconds_of

Tensor = Any  # torch.Tensor, which type checkers do not see
Options = Any  # of torch, a class for each collective
Work = Any  # DoneWork, RunningWork or RunningWorks

PREMUL_SUM = int(ReduceOp.PREMUL_SUM)
UNSET = timedelta(milliseconds=-1)
_OURS = 3  # frames from Site.of_caller's to that of tools.py


@untraced
class Calls:
    """The way in which a group makes a call.

    Attributes:
        engine_group: the group as the engine knows it.
        devices: the groups for calls whose tensors are not on the CPU.
    """

    engine_group: ProcessGroup
    devices: DeviceGroups

    def share_bucket(self, tensor: Tensor) -> None:
        """Let the ranks of this host read one of DDP's buckets in place from now on."""
        shared_buckets.share(tensor, self.engine_group.communicator)

    def _at_once(
        self,
        collective: int,
        operation: str,
        source: Tensor | list[Tensor] | None,
        target: Tensor | list[Tensor] | None,
        opts: Options,
        results: Sequence[Any],
        *,
        op: int = 0,
        root: int = 0,
        in_place: bool = False,
    ) -> Work | None:
        """Make the call with the tensors as they are; None, with nothing done, if the engine cannot
        take them.

        In that case, their devices, dtypes, sizes and layouts remain to be checked.

        Args:
            collective: a plain int: adding to an enum's members is slow.
            source, target: all input blocks and all output blocks, each as one tensor or as a list
                with one for each rank.
            in_place: source and target may be the same tensor.
        """
        group = self.engine_group
        timeout = opts.timeout
        if opts.asyncOp:
            timeout_s = -1.0 if timeout == UNSET else seconds_of(timeout)
            native = group.communicator.submit(
                collective, op, root, source, target, -1, 1.0, False, timeout_s, True, in_place
            )
            if isinstance(native, int):
                return None
            what = source if type(target) is not list or type(source) is list else target
            called = CallDetails(operation, what, op, root, 0, Site.of_caller(_OURS))
            return RunningWork(native, group, called, results)
        if timeout != UNSET:
            return None
        code = (group.run if in_place else group.run_apart)(collective, op, root, source, target)
        if code == 0:
            return DoneWork(results)
        if code < 0:
            return None
        what = source if type(target) is not list or type(source) is list else target
        raise CallDetails(operation, what, op, root).error(group, code)

    def _send(self, tensor: Tensor, to: int, tag: int) -> Work:
        work = self._post(True, to, tag, tensor)
        if work is not None:
            return work
        array = Memory("send", moves=True).reads(tensor)
        return post_message(
            self.engine_group, "isend", to, tag, array, timeout=None, kind=RunningWork
        )

    def _receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        work = self._post(False, source, tag, tensor)
        if work is not None:
            return work
        memory = Memory("recv", moves=True)
        array = memory.writes(tensor)
        return post_message(
            self.engine_group,
            "irecv",
            source,
            tag,
            array,
            timeout=None,
            results=[tensor],
            then=memory.finish if memory.has_copies else None,
            kind=RunningWork,
        )

    def _post(self, sends: bool, peer: int, tag: int, tensor: Tensor) -> Work | None:
        """Post a send or receive; like `_at_once`."""
        group = self.engine_group
        native = group.communicator.post(sends, peer, tag, tensor, -1, -1.0, True)
        if isinstance(native, int):
            return None
        called = CallDetails("isend" if sends else "irecv", tensor)
        return RunningWork(native, group, called, () if sends else (tensor,))

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
        finish = memory.finish if memory is not None and memory.has_copies else None
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
            timeout=None if opts.timeout == UNSET else opts.timeout,
            results=returns,
            then=finish,
            kind=RunningWork,
        )
        return DoneWork(returns) if work is None else work

    def _of_root(
        self, lists: Sequence[Sequence[Tensor]], root: int, operation: str, side: str
    ) -> Sequence[Tensor] | None:
        """The root's tensors, one for each rank; None on the others, which must not give any."""
        if root == self.engine_group.own_rank:
            given: Sequence[Tensor] = only(lists, operation)
            return given
        self._rank(root, operation)
        if lists:
            raise InvalidArgumentError(
                f"{operation}: {side}s are only for the root, rank {root}; pass none on this rank"
            )
        return None

    def _rank(self, rank: int, operation: str) -> int:
        """A root or peer, checked to be a rank of the group."""
        if not 0 <= rank < len(self.engine_group.ranks):
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


@contextmanager
def side_by_side(opts: Options, outputs: Sequence[Any]) -> Iterator[Begun]:
    """Within this context, calls with `opts` only begin; at its end, all are waited for, if
    requested.
    """
    is_async, opts.asyncOp = opts.asyncOp, True
    works = Begun()
    try:
        with ended_on_error(works):
            yield works
    finally:
        opts.asyncOp = is_async
    works.whole = joined(works, outputs)
    if not is_async:
        works.whole.wait()


class Begun(list[Any]):
    """The works begun side by side; `whole` is all of them as one."""

    whole: Work


def check_pairs(outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: str) -> None:
    """Refuse lists of different lengths."""
    if len(outputs) != len(inputs):
        raise InvalidArgumentError(
            f"{operation}: {len(outputs)} output tensors for {len(inputs)} input tensors; pass one "
            "for each"
        )


def operator_of(op: Any) -> Operator:  # noqa: ANN401 - torch's ReduceOp
    """The engine's operator for one of torch's."""
    code = int(op.op)
    return PremulSum(factor_of(op)) if code == PREMUL_SUM else ReduceOp(code)


def only(tensors: Sequence[Any], operation: str) -> Any:  # noqa: ANN401 - a tensor, or a list of them
    """The only element of a list, which PyTorch uses from the days of several devices per
    process.
    """
    if len(tensors) != 1:
        raise InvalidArgumentError(f"{operation} takes one tensor of a rank, not {len(tensors)}")
    return tensors[0]
