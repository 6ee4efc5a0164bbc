"""torch.distributed's collectives on the engine: the methods that PyTorch calls on a group.

Their names, arguments and the positions of tensors in lists are PyTorch's (as of 2.13); ranks are
ranks in the group. torch_calls.py makes the call; tools.py decides how it reaches the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C import _distributed_c10d as c10d

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidTypeError, MismatchError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.call import run
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.memory.arrays import (
    Blocks,
    check_divides,
    check_items,
)
from rallypoint.process_group.operators import Operator
from rallypoint.process_group.work import CollectiveCall
from rallypoint.pytorch.memory import Memory
from rallypoint.pytorch.tools import routed, routed_alone, untraced
from rallypoint.pytorch.torch_calls import (
    UNSET,
    Calls,
    Options,
    Tensor,
    Work,
    check_pairs,
    only,
    operator_of,
    side_by_side,
)
from rallypoint.pytorch.torch_work import DoneWork


def all_reduce_sparse(
    group: ProcessGroup,
    tensor: Any,  # noqa: ANN401 - of torch
    op: Operator,
    timeout: timedelta | None = None,
) -> None:
    """Combine the sparse COO tensors of all ranks, in place; their shapes must be equal.

    It is complete when the call returns, because the ranks must first learn the numbers of entries.

    Args:
        timeout: how long each step may wait for a peer; None for the timeout of the group's calls.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise InvalidTypeError(f"all_reduce of sparse tensors takes SUM or AVG, not {op}")
    own = tensor.detach().coalesce()
    places, values = own.indices().t().contiguous(), own.values().contiguous()
    told = torch.empty(group.size(), 1 + tensor.dim(), dtype=torch.int64)
    _all_gather(group, torch.tensor([places.shape[0], *tensor.shape]), list(told), timeout)
    counts, shapes = told[:, 0], told[:, 1:].tolist()
    for rank, shape in zip(group.ranks, shapes, strict=True):
        if shape != shapes[0]:
            raise MismatchError(
                f"all_reduce of sparse tensors: the tensor of rank {rank} has the shape {shape}, "
                f"that of rank {group.ranks[0]} {shapes[0]}; their shapes must be equal",
                rank=rank,
                operation="all_reduce",
            )
    all_places = [places.new_empty((int(count), places.shape[1])) for count in counts]
    all_values = [values.new_empty((int(count), *values.shape[1:])) for count in counts]
    _all_gather(group, places, all_places, timeout)
    _all_gather(group, values, all_values, timeout)
    total = torch.sparse_coo_tensor(
        torch.cat(all_places).t(), torch.cat(all_values), tensor.shape, check_invariants=False
    ).coalesce()
    if op is ReduceOp.AVG:
        total = total / group.size()
    with torch.no_grad():  # a detached tensor would take over the entries
        tensor.copy_(total)


def _all_gather(
    group: ProcessGroup,
    source: Any,  # noqa: ANN401 - of torch
    targets: list[Any],
    timeout: timedelta | None,
) -> None:
    memory = Memory("all_reduce", moves=True)
    array, arrays = memory.reads(source), [memory.writes(target) for target in targets]
    call = CollectiveCall(
        Collective.ALL_GATHER, "all_reduce", array, arrays, timeout=timeout, uneven=True
    )
    run(group, call)
    memory.finish()


_NOTHING = np.empty(0, np.uint8)
# Plain numbers, because operations on members of an enum are slow.
_ALL_REDUCE, _BROADCAST = int(Collective.ALL_REDUCE), int(Collective.BROADCAST)
_REDUCE, _REDUCE_SCATTER = int(Collective.REDUCE), int(Collective.REDUCE_SCATTER)
_ALL_GATHER, _GATHER = int(Collective.ALL_GATHER), int(Collective.GATHER)
_SCATTER, _ALL_TO_ALL = int(Collective.SCATTER), int(Collective.ALL_TO_ALL)
_BARRIER = int(Collective.BARRIER)


@untraced
class Collectives(Calls):
    """The collectives of a group."""

    @routed
    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> Work:
        """Combine a tensor of each rank, in place."""
        opts = opts or c10d.AllreduceOptions()
        tensor = only(tensors, "all_reduce")
        op = int(opts.reduceOp.op)
        work = self._at_once(
            _ALL_REDUCE, "all_reduce", tensor, tensor, opts, tensors, op=op, in_place=True
        )
        if work is not None:
            return work
        if tensor.is_sparse:
            timeout = None if opts.timeout == UNSET else opts.timeout
            all_reduce_sparse(self.engine_group, tensor, operator_of(opts.reduceOp), timeout)
            return DoneWork(tensors)
        return self._in_place(Collective.ALL_REDUCE, "all_reduce", tensor, opts)

    @routed
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options = None) -> Work:
        """Combine several tensors, side by side."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        with side_by_side(opts, tensors) as begun:
            begun.extend(self.allreduce([tensor], opts) for tensor in tensors)
        return begun.whole

    @routed
    def broadcast(self, tensors: list[Tensor], opts: Options) -> Work:
        """Copy the root's tensor to all ranks."""
        tensor = only(tensors, "broadcast")
        root = self._rank(opts.rootRank, "broadcast")
        return self._at_once(
            _BROADCAST, "broadcast", tensor, tensor, opts, tensors, root=root, in_place=True
        ) or self._in_place(Collective.BROADCAST, "broadcast", tensor, opts, root=root)

    @routed
    def reduce(self, tensors: list[Tensor], opts: Options) -> Work:
        """Combine a tensor of each rank into the root's."""
        tensor = only(tensors, "reduce")
        root = self._rank(opts.rootRank, "reduce")
        op = int(opts.reduceOp.op)
        target = tensor if root == self.engine_group.own_rank else None
        return self._at_once(
            _REDUCE, "reduce", tensor, target, opts, tensors, op=op, root=root, in_place=True
        ) or self._in_place(Collective.REDUCE, "reduce", tensor, opts, root=root)

    @routed
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        """Collect a tensor of each rank on all ranks; they may differ in size."""
        opts = opts or c10d.AllgatherOptions()
        targets, source = only(outputs, "all_gather"), only(inputs, "all_gather")
        work = self._at_once(_ALL_GATHER, "all_gather", source, targets, opts, outputs)
        if work is not None:
            return work
        self._check_count(targets, "all_gather", "output")
        memory = Memory("all_gather", moves=True)
        return self._run(
            Collective.ALL_GATHER,
            "all_gather",
            memory.reads(source),
            [memory.writes(target) for target in targets],
            opts,
            memory=memory,
            returns=outputs,
        )

    @routed
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:  # noqa: A002
        """Collect the ranks' tensors in one tensor, one after the other."""
        opts = opts or c10d.AllgatherOptions()
        name = "all_gather_into_tensor"
        work = self._at_once(_ALL_GATHER, name, input, output, opts, (output,))
        if work is not None:
            return work
        check_items(output, input.numel() * self.engine_group.size(), name, "output")
        memory = Memory(name, moves=True)
        source, target = memory.reads(input), memory.writes(output)
        return self._run(
            Collective.ALL_GATHER, name, source, target, opts, memory=memory, returns=[output]
        )

    @routed
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

    @routed
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

    @routed
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options) -> Work:
        """Collect a tensor of each rank on the root."""
        source, root = only(inputs, "gather"), opts.rootRank
        targets = self._of_root(outputs, root, "gather", "output")
        work = self._at_once(_GATHER, "gather", source, targets, opts, outputs, root=root)
        if work is not None:
            return work
        if targets is not None:
            self._check_count(targets, "gather", "output")
        memory = Memory("gather", moves=True)
        return self._run(
            Collective.GATHER,
            "gather",
            memory.reads(source),
            None if targets is None else [memory.writes(target) for target in targets],
            opts,
            root=root,
            memory=memory,
            returns=outputs,
        )

    @routed
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> Work:
        """Give each rank its tensor of the root's list."""
        target, root = only(outputs, "scatter"), opts.rootRank
        sources = self._of_root(inputs, root, "scatter", "input")
        work = self._at_once(_SCATTER, "scatter", sources, target, opts, outputs, root=root)
        if work is not None:
            return work
        if sources is not None:
            self._check_count(sources, "scatter", "input")
        memory = Memory("scatter", moves=True)
        return self._run(
            Collective.SCATTER,
            "scatter",
            None if sources is None else [memory.reads(source) for source in sources],
            memory.writes(target),
            opts,
            root=root,
            memory=memory,
            returns=outputs,
        )

    @routed
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None
    ) -> Work:
        """Combine the ranks' lists, and give each rank its tensor of the result."""
        opts = opts or c10d.ReduceScatterOptions()
        target, sources = only(outputs, "reduce_scatter"), only(inputs, "reduce_scatter")
        op = int(opts.reduceOp.op)
        work = self._at_once(
            _REDUCE_SCATTER, "reduce_scatter", sources, target, opts, outputs, op=op
        )
        if work is not None:
            return work
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

    @routed
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:  # noqa: A002
        """Combine the ranks' tensors, and give each rank its part of the result."""
        opts = opts or c10d.ReduceScatterOptions()
        name = "reduce_scatter_tensor"
        op = int(opts.reduceOp.op)
        work = self._at_once(_REDUCE_SCATTER, name, input, output, opts, (output,), op=op)
        if work is not None:
            return work
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

    @routed
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

    @routed
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
        source, target = input, output
        is_even = not output_split_sizes and not input_split_sizes
        if is_even:
            check_divides(input, self.engine_group.size(), name, "input")
        else:
            source = list(self._parts(input, input_split_sizes, name, "input"))
            target = list(self._parts(output, output_split_sizes, name, "output"))
        work = self._at_once(_ALL_TO_ALL, name, source, target, opts, (output,))
        if work is not None:
            return work
        memory = Memory(name, moves=True)
        if is_even:
            check_items(output, input.numel(), name, "output")
            read: Blocks = memory.reads(input)
            written: Blocks = memory.writes(output)
        else:
            read, written = list(map(memory.reads, source)), list(map(memory.writes, target))
        return self._run(
            Collective.ALL_TO_ALL,
            name,
            read,
            written,
            opts,
            uneven=not is_even,
            memory=memory,
            returns=[output],
        )

    @routed
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        """Send a tensor to each rank and receive one from each."""
        opts = opts or c10d.AllToAllOptions()
        work = self._at_once(_ALL_TO_ALL, "all_to_all", inputs, outputs, opts, outputs)
        if work is not None:
            return work
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

    @routed_alone
    def barrier(self, opts: Options = None) -> Work:
        """Wait until all ranks have called this, and the work queued on their streams is done."""
        opts = opts or c10d.BarrierOptions()
        self.devices.settle(opts)
        work = self._at_once(_BARRIER, "barrier", None, None, opts, ())
        if work is not None:
            return work
        return self._run(Collective.BARRIER, "barrier", _NOTHING, _NOTHING, opts, returns=[])

    @routed
    def gather_single(self, output: Tensor, input: Tensor, opts: Options) -> Work:  # noqa: A002
        """Collect the ranks' tensors in one tensor of the root, one after the other."""
        root, name = self._rank(opts.rootRank, "gather_into_tensor"), "gather_into_tensor"
        memory = Memory(name, moves=True)
        target = None
        if root == self.engine_group.own_rank:
            check_items(output, input.numel() * self.engine_group.size(), name, "output")
            target = memory.writes(output)
        return self._run(
            Collective.GATHER,
            name,
            memory.reads(input),
            target,
            opts,
            root=root,
            memory=memory,
            returns=[output],
        )

    # The names before 2.13, which direct callers may still use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
