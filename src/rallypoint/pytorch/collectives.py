"""torch.distributed's collectives on the engine: the methods that PyTorch calls on a group.

Their names, arguments and the places of tensors in lists are PyTorch's (facts of 2.13); ranks are
those in the group. How a call is made is calls.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch._C import _distributed_c10d as c10d

from rallypoint.process_group.calls import Blocks
from rallypoint.process_group.parts import check_divides, check_items
from rallypoint.pytorch.calls import (
    PREMUL_SUM,
    Calls,
    Options,
    Tensor,
    Work,
    check_pairs,
    only,
    operator_of,
    side_by_side,
)
from rallypoint.pytorch.devices import by_device
from rallypoint.pytorch.memory import Memory
from rallypoint.pytorch.sparse import all_reduce_sparse
from rallypoint.pytorch.untraced import untraced
from rallypoint.pytorch.work import DoneWork
from rallypoint.schedule.collective import Collective

_NOTHING = np.empty(0, np.float32)
_ALL_REDUCE, _BROADCAST = int(Collective.ALL_REDUCE), int(Collective.BROADCAST)


@untraced
class Collectives(Calls):
    """What a group does together."""

    @by_device
    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> Work:
        """Combine a tensor of each rank, in place."""
        opts = opts or c10d.AllreduceOptions()
        tensor = only(tensors, "all_reduce")
        if tensor.is_sparse:
            all_reduce_sparse(self.engine_group, tensor, operator_of(opts.reduceOp))
            return DoneWork(tensors)
        code = int(opts.reduceOp.op)
        work = None
        if code != PREMUL_SUM and not tensor.is_neg():
            work = self._quick(_ALL_REDUCE, "all_reduce", tensor, opts, op=code)
        return work or self._in_place(Collective.ALL_REDUCE, "all_reduce", tensor, opts)

    @by_device
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options = None) -> Work:
        """Combine several tensors, side by side."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        with side_by_side(opts, tensors) as begun:
            begun.extend(self.allreduce([tensor], opts) for tensor in tensors)
        return begun.whole

    @by_device
    def broadcast(self, tensors: list[Tensor], opts: Options) -> Work:
        """Copy the root's tensor to all ranks."""
        tensor = only(tensors, "broadcast")
        root = self._rank(opts.rootRank, "broadcast")
        work = None
        if not tensor.is_neg():
            work = self._quick(_BROADCAST, "broadcast", tensor, opts, root=root)
        return work or self._in_place(Collective.BROADCAST, "broadcast", tensor, opts, root=root)

    @by_device
    def reduce(self, tensors: list[Tensor], opts: Options) -> Work:
        """Combine a tensor of each rank into the root's."""
        tensor = only(tensors, "reduce")
        root = self._rank(opts.rootRank, "reduce")
        return self._in_place(Collective.REDUCE, "reduce", tensor, opts, root=root)

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
        check_items(output, input.numel() * self.engine_group.size(), name, "output")
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
        for of_rank in outputs:
            check_pairs(of_rank, inputs, "all_gather_coalesced")
        with side_by_side(opts, outputs) as begun:
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
        check_pairs(outputs, inputs, "all_gather_into_tensor_coalesced")
        with side_by_side(opts, outputs) as begun:
            for output, tensor in zip(outputs, inputs, strict=True):
                begun.append(self.all_gather_single(output, tensor, opts))
        return begun.whole

    @by_device
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options) -> Work:
        """Collect a tensor of each rank on the root."""
        source = only(inputs, "gather")
        memory = Memory("gather", moves=True)
        targets = self._of_root(outputs, opts, "gather", "output")
        return self._run(
            Collective.GATHER,
            "gather",
            memory.reads(source),
            None if targets is None else [memory.writes(target) for target in targets],
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
        sources = self._of_root(inputs, opts, "scatter", "input")
        return self._run(
            Collective.SCATTER,
            "scatter",
            None if sources is None else [memory.reads(source) for source in sources],
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
            op=operator_of(opts.reduceOp),
            memory=memory,
            returns=outputs,
        )

    @by_device
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:  # noqa: A002
        """Combine the ranks' tensors, and hand each rank its part of the result."""
        opts = opts or c10d.ReduceScatterOptions()
        name = "reduce_scatter_tensor"
        check_items(input, output.numel() * self.engine_group.size(), name, "input")
        memory = Memory(name)
        source, target = memory.reads(input), memory.writes(output)
        return self._run(
            Collective.REDUCE_SCATTER,
            name,
            source,
            target,
            opts,
            op=operator_of(opts.reduceOp),
            memory=memory,
            returns=[output],
        )

    @by_device
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        """`reduce_scatter_single` of several tensors, side by side."""
        opts = opts or c10d.ReduceScatterOptions()
        check_pairs(outputs, inputs, "reduce_scatter_tensor_coalesced")
        with side_by_side(opts, outputs) as begun:
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
            check_divides(input, self.engine_group.size(), name, "input")
            check_items(output, input.numel(), name, "output")
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
