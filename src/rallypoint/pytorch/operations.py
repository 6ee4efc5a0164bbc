"""The operations of a group, by the methods that PyTorch calls.

Names, arguments and the positions of tensors in lists are PyTorch's (as of 2.13); ranks are ranks
in the group. tools.py decides how a call reaches the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch._C import _distributed_c10d as c10d

from rallypoint.base.collective import Collective
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.arrays import check_count, check_divides, part_sizes
from rallypoint.process_group.groups.call_errors import CallDetails, Site
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.work import ended_on_error
from rallypoint.pytorch.device_groups import DeviceGroups
from rallypoint.pytorch.tools import routed, routed_alone, untraced
from rallypoint.pytorch.torch_work import UNSET, DoneWork, RunningWork, joined
from rallypoint.pytorch.versions import NAMES_BEFORE
from rallypoint.store.store import seconds_of

if TYPE_CHECKING:
    from rallypoint.pytorch.torch_calls import Options, Tensor, Tensors, Work

Only = TypeVar("Only")  # a tensor, or a list of tensors

# Plain numbers, because operations on members of an enum are slow.
_ALL_REDUCE, _BROADCAST = int(Collective.ALL_REDUCE), int(Collective.BROADCAST)
_REDUCE, _REDUCE_SCATTER = int(Collective.REDUCE), int(Collective.REDUCE_SCATTER)
_ALL_GATHER, _GATHER = int(Collective.ALL_GATHER), int(Collective.GATHER)
_SCATTER, _ALL_TO_ALL = int(Collective.SCATTER), int(Collective.ALL_TO_ALL)
_BARRIER = int(Collective.BARRIER)

_ANY = -1  # as a source: any rank
_OURS = 3  # frames from Site.of_caller's to that of tools.py


@untraced
class Operations:
    """All operations of a group, shared by the group and the backend below it.

    Both use one group of the engine, which holds all mutable state.
    """

    engine_group: ProcessGroup
    devices: DeviceGroups  # that take calls with tensors on other devices

    def name(self) -> str:
        """The backend's name."""
        return self.engine_group.backend

    getBackendName = name  # noqa: N815 - torch's
    _get_backend_name = name

    def _call(
        self,
        collective: int,
        operation: str,
        source: Tensors,
        target: Tensors,
        opts: Options,
        results: Sequence[Any],
        *,
        op: int = 0,
        root: int = 0,
        in_place: bool = False,
    ) -> Work:
        """Make a collective call, with its tensors as they are if the engine can take them.

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
            if not isinstance(native, int):
                what = source if type(target) is not list or type(source) is list else target
                called = CallDetails(operation, what, op, root, 0, Site.of_caller(_OURS))
                return RunningWork(native, group, called, results)
        elif timeout == UNSET:
            run = group.run if in_place else group.run_apart
            code = run(collective, op, root, source, target)
            if code == 0:
                return DoneWork(results)
            if code > 0:
                what = source if type(target) is not list or type(source) is list else target
                raise CallDetails(operation, what, op, root).error(group, code)
        make: Callable[..., Work]
        calls = self.devices.calls_of(source, target)
        if calls is not None:
            make = calls.collective
        else:
            from rallypoint.pytorch.torch_calls import (
                collective_of_arrays,  # usual calls do not come here
            )

            make = partial(collective_of_arrays, group)
        kind = Collective(collective)
        return make(kind, operation, source, target, opts, results, root=root, in_place=in_place)

    def _post(self, operation: str, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin an "isend" or "irecv", like `_call`."""
        group, sends = self.engine_group, operation == "isend"
        native = group.communicator.post(sends, peer, tag, tensor, -1, -1.0, True)
        if isinstance(native, int):
            calls = self.devices.calls_of(tensor)
            if calls is not None:
                return calls.message(operation, tensor, peer, tag)
            from rallypoint.pytorch.torch_calls import message_of_array  # as in _call

            return message_of_array(group, operation, tensor, peer, tag)
        called = CallDetails(operation, tensor)
        return RunningWork(native, group, called, () if sends else (tensor,))

    def _rank(self, rank: int, operation: str) -> int:
        """A root or peer, checked to be a rank of the group."""
        if not 0 <= rank < len(self.engine_group.ranks):
            raise InvalidArgumentError(
                f"{operation}: {rank} is not a rank of this group, which has "
                f"{self.engine_group.size()} ranks"
            )
        return rank

    def _peer(self, rank: int, operation: str) -> int:
        if rank == self.engine_group.own_rank:
            raise InvalidArgumentError(f"{operation}: {rank} is this rank itself; name another one")
        return self._rank(rank, operation)

    def _of_root(
        self, lists: Sequence[Sequence[Tensor]], root: int, operation: str, side: str
    ) -> Tensors:
        """The root's tensors, one for each rank; None on the others, which must not give any."""
        if root == self.engine_group.own_rank:
            return only(lists, operation)
        self._rank(root, operation)
        if lists:
            raise InvalidArgumentError(
                f"{operation}: {side}s are only for the root, rank {root}; pass none on this rank"
            )
        return None

    # Collectives.

    @routed
    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> Work:
        """Combine a tensor of each rank, in place."""
        opts = opts or c10d.AllreduceOptions()
        tensor = only(tensors, "all_reduce")
        op = int(opts.reduceOp.op)
        return self._call(
            _ALL_REDUCE, "all_reduce", tensor, tensor, opts, tensors, op=op, in_place=True
        )

    @routed
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options = None) -> Work:
        """Combine several tensors, side by side."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        return side_by_side((self.allreduce([each], opts) for each in tensors), opts, tensors)

    @routed
    def broadcast(self, tensors: list[Tensor], opts: Options) -> Work:
        """Copy the root's tensor to all ranks."""
        tensor = only(tensors, "broadcast")
        root = self._rank(opts.rootRank, "broadcast")
        return self._call(
            _BROADCAST, "broadcast", tensor, tensor, opts, tensors, root=root, in_place=True
        )

    @routed
    def reduce(self, tensors: list[Tensor], opts: Options) -> Work:
        """Combine a tensor of each rank into the root's."""
        tensor = only(tensors, "reduce")
        root = self._rank(opts.rootRank, "reduce")
        op = int(opts.reduceOp.op)
        target = tensor if root == self.engine_group.own_rank else None
        return self._call(
            _REDUCE, "reduce", tensor, target, opts, tensors, op=op, root=root, in_place=True
        )

    @routed
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        """Collect a tensor of each rank on all ranks; they may differ in size."""
        opts = opts or c10d.AllgatherOptions()
        targets, source = only(outputs, "all_gather"), only(inputs, "all_gather")
        return self._call(_ALL_GATHER, "all_gather", source, targets, opts, outputs)

    @routed
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:  # noqa: A002
        """Collect the ranks' tensors in one tensor, one after the other."""
        opts = opts or c10d.AllgatherOptions()
        return self._call(_ALL_GATHER, "all_gather_into_tensor", input, output, opts, (output,))

    @routed
    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        """Collect several tensors; ``outputs[rank][i]`` is `inputs[i]` of that rank."""
        opts = opts or c10d.AllgatherOptions()
        check_count(outputs, self.engine_group.size(), "all_gather_coalesced", "output")
        for of_rank in outputs:
            check_pairs(of_rank, inputs, "all_gather_coalesced")
        targets = zip(*outputs, strict=True)
        calls = (
            self.allgather([list(each)], [tensor], opts)
            for each, tensor in zip(targets, inputs, strict=True)
        )
        return side_by_side(calls, opts, outputs)

    @routed
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        """`all_gather_single` of several tensors, side by side."""
        opts = opts or c10d.AllgatherOptions()
        check_pairs(outputs, inputs, "all_gather_into_tensor_coalesced")
        calls = (self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True))
        return side_by_side(calls, opts, outputs)

    @routed
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options) -> Work:
        """Collect a tensor of each rank on the root."""
        source, root = only(inputs, "gather"), opts.rootRank
        targets = self._of_root(outputs, root, "gather", "output")
        return self._call(_GATHER, "gather", source, targets, opts, outputs, root=root)

    @routed
    def gather_single(self, output: Tensor, input: Tensor, opts: Options) -> Work:  # noqa: A002
        """Collect the ranks' tensors in one tensor of the root, one after the other."""
        root, name = self._rank(opts.rootRank, "gather_into_tensor"), "gather_into_tensor"
        target = output if root == self.engine_group.own_rank else None
        return self._call(_GATHER, name, input, target, opts, (output,), root=root)

    @routed
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> Work:
        """Give each rank its tensor of the root's list."""
        target, root = only(outputs, "scatter"), opts.rootRank
        sources = self._of_root(inputs, root, "scatter", "input")
        return self._call(_SCATTER, "scatter", sources, target, opts, outputs, root=root)

    @routed
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None
    ) -> Work:
        """Combine the ranks' lists, and give each rank its tensor of the result."""
        opts = opts or c10d.ReduceScatterOptions()
        target, sources = only(outputs, "reduce_scatter"), only(inputs, "reduce_scatter")
        op = int(opts.reduceOp.op)
        return self._call(_REDUCE_SCATTER, "reduce_scatter", sources, target, opts, outputs, op=op)

    @routed
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:  # noqa: A002
        """Combine the ranks' tensors, and give each rank its part of the result."""
        opts = opts or c10d.ReduceScatterOptions()
        name, op = "reduce_scatter_tensor", int(opts.reduceOp.op)
        return self._call(_REDUCE_SCATTER, name, input, output, opts, (output,), op=op)

    @routed
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        """`reduce_scatter_single` of several tensors, side by side."""
        opts = opts or c10d.ReduceScatterOptions()
        check_pairs(outputs, inputs, "reduce_scatter_tensor_coalesced")
        pairs = zip(outputs, inputs, strict=True)
        calls = (self.reduce_scatter_single(*pair, opts) for pair in pairs)
        return side_by_side(calls, opts, outputs)

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
        name, ranks = "all_to_all_single", self.engine_group.size()
        source, target = input, output
        if not output_split_sizes and not input_split_sizes:
            check_divides(input, ranks, name, "input")
        else:
            source = _parts(input, input_split_sizes, ranks, name, "input")
            target = _parts(output, output_split_sizes, ranks, name, "output")
        return self._call(_ALL_TO_ALL, name, source, target, opts, (output,))

    @routed
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        """Send a tensor to each rank and receive one from each."""
        opts = opts or c10d.AllToAllOptions()
        return self._call(_ALL_TO_ALL, "all_to_all", inputs, outputs, opts, outputs)

    @routed_alone
    def barrier(self, opts: Options = None) -> Work:
        """Wait until all ranks have called this, and the work queued on their streams is done."""
        opts = opts or c10d.BarrierOptions()
        self.devices.settle(opts)
        return self._call(_BARRIER, "barrier", None, None, opts, ())

    # Messages from one rank to another.

    @routed
    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Begin to send a tensor, which must not be changed before the work has completed."""
        return self._post("isend", only(tensors, "send"), self._peer(dst, "send"), tag)

    @routed
    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        """Begin to receive a tensor."""
        tensor = only(tensors, "recv")
        return self._post("irecv", tensor, src if src == _ANY else self._peer(src, "recv"), tag)

    @routed
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Begin to receive a tensor from any rank."""
        return self._post("irecv", only(tensors, "recv"), _ANY, tag)

    # Its state and its end.

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives that this rank has begun."""
        return self.engine_group.communicator.begun

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: the engine counts by itself."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations that begin from now on may wait for a peer."""
        self.engine_group.set_timeout(timeout)
        for group in self.devices.made():
            group.set_timeout(timeout)

    def abort(self) -> None:
        """End the waits of all ranks of the group with an error, and leave it."""
        self.engine_group.abort()

    def shutdown(self) -> None:
        """Leave the group; peers that wait for this rank get an error."""
        self.engine_group.destroy()


# Direct callers may still use the names before 2.13.
for _name, _earlier in NAMES_BEFORE.items():
    setattr(Operations, _earlier, getattr(Operations, _name))


def _parts(
    tensor: Tensor, sizes: Sequence[int], ranks: int, operation: str, side: str
) -> list[Tensor]:
    """The parts of a tensor along its first dimension, of the given sizes or evenly."""
    sizes = part_sizes(tensor, sizes, ranks, operation, side)
    return list(tensor.split(sizes)) if tensor.dim() else [tensor]


def side_by_side(calls: Iterable[Work], opts: Options, results: Sequence[Any]) -> Work:
    """Several calls with the same `opts` as one; `calls` makes each when it is asked for it.

    They only begin, and are waited for together if `opts` asks for it.
    """
    is_async, opts.asyncOp = opts.asyncOp, True
    works: list[Work] = []
    try:
        with ended_on_error(works):
            works.extend(calls)  # keeps those before an error
    finally:
        opts.asyncOp = is_async
    whole = joined(works, results)
    if not is_async:
        whole.wait()
    return whole


def check_pairs(outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: str) -> None:
    """Refuse lists of different lengths."""
    if len(outputs) != len(inputs):
        raise InvalidArgumentError(
            f"{operation}: {len(outputs)} output tensors for {len(inputs)} input tensors; pass one "
            "for each"
        )


def only(tensors: Sequence[Only], operation: str) -> Only:
    """The only element of a list, which PyTorch passes from the days of several devices."""
    if len(tensors) != 1:
        raise InvalidArgumentError(f"{operation} takes one tensor of a rank, not {len(tensors)}")
    return tensors[0]
