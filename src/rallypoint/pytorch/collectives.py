"""torch.distributed's collectives on the engine: the methods that PyTorch calls on a group.

Their names, arguments and the places of tensors in lists are PyTorch's (facts of 2.13); ranks are
those in the group. The common calls, of one dense CPU tensor, go straight to the engine; all others
through process_group.calls, which is also where errors get their words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
from torch._C import _distributed_c10d as c10d

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.accounts import Site, failure
from rallypoint.process_group.arrays import describe
from rallypoint.process_group.calls import Blocks, run
from rallypoint.process_group.groups import ProcessGroup
from rallypoint.process_group.operators import Operator, PremulSum
from rallypoint.process_group.work import Called, OneWork
from rallypoint.pytorch.devices import Devices, by_device
from rallypoint.pytorch.memory import Memory
from rallypoint.pytorch.sparse import all_reduce_sparse
from rallypoint.pytorch.untraced import untraced
from rallypoint.pytorch.work import DoneWork, RunningWork, joined
from rallypoint.schedule.collective import Collective

Tensor = Any  # torch.Tensor, which type checkers do not see
Options = Any  # of torch, a class for each collective
Work = Any  # DoneWork or RunningWork

_UNSET = timedelta(milliseconds=-1)
_NOTHING = np.empty(0, np.float32)
_PREMUL_SUM = int(ReduceOp.PREMUL_SUM)
_ALL_REDUCE, _BROADCAST = int(Collective.ALL_REDUCE), int(Collective.BROADCAST)


@untraced
class Collectives:
    """What a group does together.

    Attributes:
        engine_group: the group as the engine knows it.
        devices: where calls go whose tensors are not on the CPU.
        own_timeout: for each call, if it is another than the group was formed with.
    """

    engine_group: ProcessGroup
    devices: Devices
    own_timeout: timedelta | None = None

    @by_device
    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> Work:
        """Combine a tensor of each rank, in place."""
        opts = opts or c10d.AllreduceOptions()
        tensor = only(tensors, "all_reduce")
        if tensor.is_sparse:
            all_reduce_sparse(self.engine_group, tensor, _operator(opts.reduceOp))
            return DoneWork(tensors)
        code = int(opts.reduceOp.op)
        work = None
        if code != _PREMUL_SUM and not tensor.is_neg():
            work = self._quick(_ALL_REDUCE, "all_reduce", tensor, opts, op=code)
        return work or self._in_place(Collective.ALL_REDUCE, "all_reduce", tensor, opts)

    @by_device
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options = None) -> Work:
        """Combine several tensors, side by side."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        with _side_by_side(opts, tensors) as begun:
            begun.extend(self.allreduce([tensor], opts) for tensor in tensors)
        return begun.whole

    @by_device
    def broadcast(self, tensors: list[Tensor], opts: Options) -> Work:
        """Copy the root's tensor to all ranks."""
        tensor = only(tensors, "broadcast")
        root = opts.rootRank
        work = None
        if not tensor.is_neg():
            work = self._quick(_BROADCAST, "broadcast", tensor, opts, root=root)
        return work or self._in_place(Collective.BROADCAST, "broadcast", tensor, opts, root=root)

    @by_device
    def reduce(self, tensors: list[Tensor], opts: Options) -> Work:
        """Combine a tensor of each rank into the root's."""
        tensor = only(tensors, "reduce")
        return self._in_place(Collective.REDUCE, "reduce", tensor, opts, root=opts.rootRank)

    @by_device
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        """Collect a tensor of each rank on all ranks; they may differ in size."""
        opts = opts or c10d.AllgatherOptions()
        targets, source = only(outputs, "all_gather"), only(inputs, "all_gather")
        self._check_count(targets, "all_gather", "output")
        memory = Memory("all_gather", moves=True)
        return self._run(
            Collective.ALL_GATHER,
            "all_gather",
            memory.reads(source),
            [memory.writes(target) for target in targets],
            opts,
            memory=memory,
            returns=[targets],
        )

    @by_device
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:  # noqa: A002
        """Collect the ranks' tensors in one, one after the other."""
        opts = opts or c10d.AllgatherOptions()
        name = "all_gather_into_tensor"
        _check_items(output, input.numel() * self.engine_group.size(), name, "output")
        memory = Memory(name, moves=True)
        source, target = memory.reads(input), memory.writes(output)
        return self._run(
            Collective.ALL_GATHER, name, source, target, opts, memory=memory, returns=[output]
        )

    @by_device
    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        """Collect several tensors; ``outputs[rank][i]`` is `inputs[i]` of that rank."""
        opts = opts or c10d.AllgatherOptions()
        self._check_count(outputs, "all_gather_coalesced", "output")
        with _side_by_side(opts, outputs) as begun:
            for index, tensor in enumerate(inputs):
                targets = [of_rank[index] for of_rank in outputs]
                begun.append(self.allgather([targets], [tensor], opts))
        return begun.whole

    @by_device
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        """`all_gather_single` of several tensors, side by side."""
        opts = opts or c10d.AllgatherOptions()
        with _side_by_side(opts, outputs) as begun:
            for output, tensor in zip(outputs, inputs, strict=True):
                begun.append(self.all_gather_single(output, tensor, opts))
        return begun.whole

    @by_device
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options) -> Work:
        """Collect a tensor of each rank on the root."""
        source = only(inputs, "gather")
        memory = Memory("gather", moves=True)
        targets = None
        if opts.rootRank == self.engine_group.own_rank:
            given = only(outputs, "gather")
            self._check_count(given, "gather", "output")
            targets = [memory.writes(target) for target in given]
        elif outputs:
            raise InvalidArgumentError(
                f"gather: outputs are for the root only, rank {opts.rootRank}; pass none here"
            )
        return self._run(
            Collective.GATHER,
            "gather",
            memory.reads(source),
            targets,
            opts,
            root=opts.rootRank,
            memory=memory,
            returns=outputs,
        )

    @by_device
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> Work:
        """Hand each rank its tensor of the root's list."""
        target = only(outputs, "scatter")
        memory = Memory("scatter", moves=True)
        sources = None
        if opts.rootRank == self.engine_group.own_rank:
            given = only(inputs, "scatter")
            self._check_count(given, "scatter", "input")
            sources = [memory.reads(source) for source in given]
        elif inputs:
            raise InvalidArgumentError(
                f"scatter: inputs are for the root only, rank {opts.rootRank}; pass none here"
            )
        return self._run(
            Collective.SCATTER,
            "scatter",
            sources,
            memory.writes(target),
            opts,
            root=opts.rootRank,
            memory=memory,
            returns=outputs,
        )

    @by_device
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None
    ) -> Work:
        """Combine the ranks' lists, and hand each rank its tensor of the result."""
        opts = opts or c10d.ReduceScatterOptions()
        target, sources = only(outputs, "reduce_scatter"), only(inputs, "reduce_scatter")
        self._check_count(sources, "reduce_scatter", "input")
        memory = Memory("reduce_scatter")
        return self._run(
            Collective.REDUCE_SCATTER,
            "reduce_scatter",
            [memory.reads(source) for source in sources],
            memory.writes(target),
            opts,
            op=_operator(opts.reduceOp),
            memory=memory,
            returns=outputs,
        )

    @by_device
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:  # noqa: A002
        """Combine the ranks' tensors, and hand each rank its part of the result."""
        opts = opts or c10d.ReduceScatterOptions()
        name = "reduce_scatter_tensor"
        _check_items(input, output.numel() * self.engine_group.size(), name, "input")
        memory = Memory(name)
        source, target = memory.reads(input), memory.writes(output)
        return self._run(
            Collective.REDUCE_SCATTER,
            name,
            source,
            target,
            opts,
            op=_operator(opts.reduceOp),
            memory=memory,
            returns=[output],
        )

    @by_device
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        """`reduce_scatter_single` of several tensors, side by side."""
        opts = opts or c10d.ReduceScatterOptions()
        with _side_by_side(opts, outputs) as begun:
            for output, tensor in zip(outputs, inputs, strict=True):
                begun.append(self.reduce_scatter_single(output, tensor, opts))
        return begun.whole

    @by_device
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Options = None,
    ) -> Work:
        """Send a part of `input` to each rank, and receive a part of `output` from each."""
        opts = opts or c10d.AllToAllOptions()
        name = "all_to_all_single"
        memory = Memory(name, moves=True)
        if not output_split_sizes and not input_split_sizes:
            self._check_divides(input, name, "input")
            _check_items(output, input.numel(), name, "output")
            source: Blocks = memory.reads(input)
            target: Blocks = memory.writes(output)
        else:
            source = list(map(memory.reads, self._parts(input, input_split_sizes, name, "input")))
            target = list(
                map(memory.writes, self._parts(output, output_split_sizes, name, "output"))
            )
        return self._run(
            Collective.ALL_TO_ALL,
            name,
            source,
            target,
            opts,
            uneven=isinstance(source, list),
            memory=memory,
            returns=[output],
        )

    @by_device
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        """Send a tensor to each rank and receive one from each."""
        opts = opts or c10d.AllToAllOptions()
        self._check_count(outputs, "all_to_all", "output")
        self._check_count(inputs, "all_to_all", "input")
        memory = Memory("all_to_all", moves=True)
        return self._run(
            Collective.ALL_TO_ALL,
            "all_to_all",
            [memory.reads(source) for source in inputs],
            [memory.writes(target) for target in outputs],
            opts,
            uneven=True,
            memory=memory,
            returns=outputs,
        )

    def barrier(self, opts: Options = None) -> Work:
        """Wait until all ranks have come here."""
        opts = opts or c10d.BarrierOptions()
        return self._run(Collective.BARRIER, "barrier", _NOTHING, _NOTHING, opts, returns=[])

    # The names before 2.13, by which direct callers may still know them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _quick(
        self, kind: int, name: str, tensor: Tensor, opts: Options, *, op: int = 0, root: int = 0
    ) -> Work | None:
        """In place, with the tensor as it is; None if the engine cannot take it so."""
        group = self.engine_group
        timeout = self._timeout(opts)
        if opts.asyncOp:
            held = tensor.detach()  # its memory stays, even if the tensor is given other memory
            timeout_s = -1.0 if timeout is None else timeout.total_seconds()
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
            target = memory.writes(tensor)
        if collective is not Collective.BROADCAST or is_root:
            source = memory.reads(tensor) if target is None else target
        return self._run(
            collective,
            operation,
            source,
            target,
            opts,
            op=_operator(opts.reduceOp) if collective.reduces else None,
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
        ranks = self.engine_group.size()
        length = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            self._check_divides(tensor, operation, side)
            sizes = [length // ranks] * ranks
        if len(sizes) != ranks or sum(sizes) != length or min(sizes) < 0:
            raise InvalidArgumentError(
                f"{operation}: {side}_split_sizes={list(sizes)} must be {ranks} sizes, one for "
                f"each rank, that add up to {length}, the first dimension of {side}"
            )
        return tensor.split(list(sizes)) if tensor.dim() else [tensor]

    def _check_divides(self, tensor: Tensor, operation: str, side: str) -> None:
        length = tensor.shape[0] if tensor.dim() else 1
        if length % self.engine_group.size():
            raise InvalidArgumentError(
                f"{operation}: the first dimension of {side}, {describe(tensor)}, does not divide "
                f"among {self.engine_group.size()} ranks; give {side}_split_sizes"
            )


class _Begun(list[Any]):
    """Works begun side by side; `whole` is all of them as one."""

    whole: Work


@contextmanager
def _side_by_side(opts: Options, outputs: Sequence[Any]) -> Iterator[_Begun]:
    """Calls with `opts` in here only begin; at the end all are waited for, if that is asked for."""
    is_async, opts.asyncOp = opts.asyncOp, True
    works = _Begun()
    try:
        yield works
    finally:
        opts.asyncOp = is_async
    works.whole = joined(works, outputs)
    if not is_async:
        works.whole.wait()


def _operator(op: Any) -> Operator:  # noqa: ANN401 - torch's ReduceOp
    code = int(op.op)
    return PremulSum(float(op.factor)) if code == _PREMUL_SUM else ReduceOp(code)


def only(tensors: Sequence[Any], operation: str) -> Any:  # noqa: ANN401 - a tensor, or a list of them
    """What PyTorch wraps in a list for the days of several devices in a process."""
    if len(tensors) != 1:
        raise InvalidArgumentError(f"{operation} takes one tensor of a rank, not {len(tensors)}")
    return tensors[0]


def _check_items(tensor: Tensor, items: int, operation: str, side: str) -> None:
    if tensor.numel() != items:
        raise InvalidArgumentError(
            f"{operation}: {side} is {describe(tensor)} and holds {tensor.numel()} items, but "
            f"{items} are needed"
        )
