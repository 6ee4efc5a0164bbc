"""DistributedDataParallel for `rallypoint.elastic`: it continues when ranks are lost or join.

It is PyTorch's, over the default group of `rallypoint`, which is formed again in place. It depends
neither on earlier steps nor on an earlier number of ranks:

    gradients    are reduced by a hook, which raises errors at the end of backward
    buckets      are laid out once, from the parameters alone, so newcomers have the same layout
    buffers      are made equal before an update instead of before the next forward
    constructor  does not communicate: State brings newcomers up to date

See docs/decisions/103-elastic-ddp.md.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Never

import torch
import torch._dynamo  # as DDP's constructor does; a spare does it here, before it is needed
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn import parallel

from rallypoint.base.errors import InvalidArgumentError, RallypointError
from rallypoint.elastic.values import UpdateParticipant
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.collectives import all_reduce
from rallypoint.process_group.groups.default import resolve
from rallypoint.pytorch.elastic.buffers import Buffers
from rallypoint.pytorch.memory import host_memory
from rallypoint.pytorch.tools import untraced
from rallypoint.pytorch.torch_work import DoneWork, future_of


class Reduction:
    """The reductions of one backward pass, all of which end with it.

    Those of a GPU are copied to pinned memory on their own stream, while the pass continues:

        backward's stream   ... gradients ready ........................ | copied back -> optimizer
        copying stream           copied to the host
        engine                                   reduced with the other ranks'

    They begin in the order of the buckets, which is the same on all ranks; each as soon as its
    gradients are in the host's memory.
    """

    def __init__(self, op: ReduceOp) -> None:
        self.op = op
        self._pass = -1
        self._to_host: deque[_HostReduction] = deque()
        self._running: list[_HostReduction] = []
        self._to_device: list[_HostReduction] = []  # perhaps still being copied
        self._failure: RallypointError | None = None

    def begin(self, tensor: torch.Tensor, op: ReduceOp, future: Any = None) -> None:  # noqa: ANN401
        """Reduce a tensor in the background; the future gets it at the end of the pass."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:  # the first of its pass, before DDP's own callback
            self._pass = current
            Variable._execution_engine.queue_callback(self._end)
            while self._to_device:  # it was copied long ago
                self._to_device.pop().await_device()
        if self._failure is None:
            self._to_host.append(_HostReduction(tensor, op, future))
            self._begin_copied(waits=False)

    def _begin_copied(self, *, waits: bool) -> None:
        while self._to_host and (waits or self._to_host[0].is_on_host()):
            one = self._to_host.popleft()
            try:
                one.begin()
            except RallypointError as error:  # C++, which calls us, would make it a RuntimeError
                self._failure = error
                return
            self._running.append(one)

    def _end(self) -> None:
        """In Python and before DDP waits in C++, so that errors are raised as what they are."""
        if self._failure is None:
            self._begin_copied(waits=True)
        running, failure = self._take()
        for one in running:
            try:
                one.end()
            except RallypointError as error:
                failure = failure or error
        self._to_device = running
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Forget a pass that failed; nothing uses its buckets afterwards."""
        for one in self._take()[0]:
            with suppress(RallypointError):
                one.wait()

    def _take(self) -> tuple[list[_HostReduction], RallypointError | None]:
        running, self._running = self._running, []
        failure, self._failure = self._failure, None
        while self._to_host:
            self._to_host.popleft().await_host()
        return running, failure


class _HostReduction:
    """The reduction of one tensor in the host's memory, and the future of its result."""

    def __init__(self, tensor: torch.Tensor, op: ReduceOp, future: Any) -> None:  # noqa: ANN401
        self._tensor, self._op, self._future = tensor, op, future
        self._items, self._copied_to_host = _on_host(tensor)
        self._copied_to_device: Any = None
        self._work: Any = None

    def is_on_host(self) -> bool:
        return self._copied_to_host is None or self._copied_to_host.query()

    def await_host(self) -> None:
        if self._copied_to_host is not None:
            self._copied_to_host.synchronize()

    def begin(self) -> None:
        self.await_host()
        self._work = all_reduce(self._items, self._op, async_op=True)

    def wait(self) -> None:
        self._work.wait()

    def end(self) -> None:
        """Have the result in the tensor, for what its device does from now on."""
        self.wait()
        if self._copied_to_host is not None:
            self._tensor.copy_(self._items, non_blocking=True)
            self._copied_to_device = torch.cuda.current_stream(self._tensor.device).record_event()
        if self._future is not None:
            self._future.set_result(self._tensor)

    def await_device(self) -> None:
        """Wait until the host's memory can be used again."""
        if self._copied_to_device is not None:
            self._copied_to_device.synchronize()


def _on_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A tensor on the host for the items of another, and the event after which it has them."""
    if not tensor.is_cuda:
        return tensor, None
    items = host_memory(tensor)
    stream = _copying_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        items.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return items, stream.record_event()


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_FIRST_BUCKET_MB = 1  # PyTorch's, for a bucket that is on its way early
_BUCKET_MB = 25
_REFUSED = {
    "process_group": "it always uses the default group of rallypoint",
    "device_mesh": "it always uses the default group of rallypoint",
    "static_graph": "it lays out the buckets again after the first step, on newcomers later",
    "delay_all_reduce_named_params": "these parameters are reduced without its hook",
    "param_to_hook_all_reduce": "these parameters are reduced without its hook",
    "mixed_precision": "use torch.autocast",
    "init_sync": "elastic.State gives all ranks the same parameters",
}


class DistributedDataParallel(UpdateParticipant, parallel.DistributedDataParallel):
    """PyTorch's DistributedDataParallel, for training that continues when ranks are lost or join.

        import rallypoint as dist
        from rallypoint import elastic
        from rallypoint.pytorch.elastic import DistributedDataParallel as DDP

        dist.init_process_group()
        model = DDP(net, average=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = elastic.State(step=0, model=model, optimizer=optimizer)

        @elastic.run
        def train(state):
            while state.step < steps:
                mine = sampler.indices(state.step)
                optimizer.zero_grad()
                loss = criterion(model(inputs[mine]), labels[mine]).sum() / sampler.global_batch
                loss.backward()
                with state.update():
                    optimizer.step()
                    state.step += 1

    Everything else is PyTorch's: forward, `no_sync`, `state_dict`. When a rank is lost, backward
    raises, and `elastic.run` retries the step without gradients and with the buffers of the
    last update. After a spare has taken the lost rank's number, parameters have the same bits as in
    a run without losses. This requires that a step depends only on its number, the rank and the
    number of ranks: seed random numbers, such as dropout's, from these at the beginning of each
    step.

    Construct it after `rallypoint.init_process_group`, and pass it to `elastic.State` itself, not
    the module in it. torch.distributed needs no group; its calls, ZeroRedundancyOptimizer and
    DistributedSampler do not follow changes of the ranks.

    Args:
        module: parameters on the CPU or on GPUs, with dense gradients. Those of GPUs are copied to
            the host, reduced there, and copied back.
        average: gradients are averaged over the ranks, as PyTorch does. False: they are summed, for
            a loss that is a sum over this rank's samples divided by the global batch. The step is
            then the same, except for rounding, for any number of ranks and any shares of the batch.
        device_ids, bucket_cap_mb, find_unused_parameters, gradient_as_bucket_view: as PyTorch's.
        broadcast_buffers: each update has all ranks take over rank 0's buffers. False: keep them
            equal yourself; they are part of the state.

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: an option of PyTorch's, or a layer, that cannot be used here.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        *,
        average: bool = True,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        **options: Any,  # noqa: ANN401
    ) -> None:
        resolve(None)
        _check(module, options)
        reduction = Reduction(ReduceOp.AVG if average else ReduceOp.SUM)
        super().__init__(
            module,
            device_ids=device_ids,
            process_group=_Replicas(reduction),
            gradient_as_bucket_view=gradient_as_bucket_view,
            init_sync=False,
            **_layout(bucket_cap_mb, find_unused_parameters=find_unused_parameters),
        )
        self.broadcast_buffers = False  # before forward: `prepare` does it
        self._reduction = reduction
        self._buffers_at_update = Buffers(are_broadcast=broadcast_buffers)
        dist._register_comm_hook(self.reducer, reduction, _reduce)

    def prepare(self) -> None:
        self._assign_modules_buffers()
        self._buffers_at_update.prepare(self.modules_buffers, resolve(None))

    def commit(self) -> None:
        self._buffers_at_update.commit(self.modules_buffers)

    def rollback(self) -> None:
        self._reduction.abandon()
        self.reducer._reset_state()
        for parameter in self._module_parameters:
            parameter.grad = None
        self._buffers_at_update.rollback(self.modules_buffers)

    def register_comm_hook(self, state: object, hook: object) -> Never:
        """Refused: there is one already.

        Raises:
            InvalidArgumentError: always.
        """
        raise InvalidArgumentError(
            f"elastic DistributedDataParallel reduces gradients by itself and does not take the "
            f"hook {getattr(hook, '__qualname__', hook)}"
        )

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> Never:
        self.register_comm_hook(None, comm_hook_type)

    def join(self, *_: object, **__: object) -> Never:
        """Refused: ranks of uneven inputs take shares of the same batch instead.

        Raises:
            InvalidArgumentError: always.
        """
        raise InvalidArgumentError(
            "elastic DistributedDataParallel has no join: give each rank its share of the step's "
            "batch (elastic.Sampler), and average=False"
        )

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self._buffers_at_update.check_committed()
        # Else PyTorch asks the group to rebuild buckets, even where it does not synchronize; with
        # unused parameters it does not.
        if torch.is_grad_enabled() and not self.find_unused_parameters:
            self.reducer._check_reducer_finalized()
            self.reducer._reset_state()
        return super()._pre_forward(*inputs, **kwargs)


def _check(module: torch.nn.Module, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value not in (None, False) or name == "init_sync":
            reason = _REFUSED.get(name, "it is not known to work after a loss")
            raise InvalidArgumentError(
                f"elastic DistributedDataParallel does not take {name}: {reason}"
            )
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            raise InvalidArgumentError(
                f"layer {name or 'of the model'} is a SyncBatchNorm, which has a process group of "
                "its own that is not formed again; use BatchNorm"
            )
        if getattr(layer, "sparse", False):
            raise InvalidArgumentError(
                f"layer {name or 'of the model'} has sparse gradients, which elastic "
                "DistributedDataParallel does not take; use sparse=False"
            )
    for name, parameter in module.named_parameters():
        if parameter.device.type not in ("cpu", "cuda"):
            raise InvalidArgumentError(
                f"parameter {name} is on {parameter.device}, and elastic DistributedDataParallel "
                "takes parameters on the CPU and on GPUs (cuda)"
            )


def _layout(bucket_cap_mb: float | None, *, find_unused_parameters: bool) -> dict[str, Any]:
    """Options by which the first layout has buckets of the usual sizes; it stays.

    Before 2.13, there are no options for that, and PyTorch lays out a single bucket if
    `find_unused_parameters is False`; None means the same everywhere else.
    """
    known = inspect.signature(parallel.DistributedDataParallel.__init__).parameters
    if "bucket_cap_mb_list" not in known:
        finds = find_unused_parameters or None
        return {"bucket_cap_mb": bucket_cap_mb, "find_unused_parameters": finds}
    usual: list[float] = [_FIRST_BUCKET_MB, _BUCKET_MB]
    limits = usual if bucket_cap_mb is None else [bucket_cap_mb]
    return {"bucket_cap_mb_list": limits, "find_unused_parameters": find_unused_parameters}


def _reduce(reduction: Reduction, bucket: Any) -> Any:  # noqa: ANN401 - of torch
    gradients = bucket.buffer()
    future = future_of([gradients])
    reduction.begin(gradients, reduction.op, future)
    return future


@untraced
class _Replicas(dist.ProcessGroup):
    """The default group, as far as DDP asks for it."""

    def __init__(self, reduction: Reduction) -> None:
        dist.ProcessGroup.__init__(self, self.getRank(), self.getSize())
        self._reduction = reduction

    def getRank(self) -> int:  # noqa: N802 - torch's names
        """This process's rank at present."""
        return resolve(None).own_rank

    def getSize(self) -> int:  # noqa: N802
        """The number of ranks at present."""
        return resolve(None).size()

    rank, size = getRank, getSize

    def getBackendName(self) -> str:  # noqa: N802
        """What DDP says of it in its log."""
        return "rallypoint"

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> DoneWork:
        """Of which parameters were used; over when DDP waits for it, at the end of the pass."""
        for each in tensors:
            self._reduction.begin(each, ReduceOp.SUM)
        return DoneWork(tensors)
