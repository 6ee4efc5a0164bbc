"""Hybrid sharding for `rallypoint.elastic`: replicas of a model under fully_shard come and go.

The ranks of a replica are torch.distributed's world, whose size never changes, so nothing that
PyTorch keeps about it goes stale: meshes, placements, sizes. Between replicas, gradients are
reduced by fully_shard's hook, over a group that is formed again in place.

See docs/decisions/105-elastic-hybrid-sharding.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from rallypoint.base.errors import AlreadyInitializedError, InvalidArgumentError, RallypointError
from rallypoint.elastic.membership import Replicas
from rallypoint.elastic.values import UpdateParticipant
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.collectives import all_reduce
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.backend import wrap_group
from rallypoint.pytorch.elastic.buffers import Buffers

_BACKEND = "rallypoint_replica"  # among PyTorch's backends


def shard_mesh(replicas: Replicas) -> DeviceMesh:
    """A mesh of this rank's replica, for fully_shard; torch.distributed's world is that replica.

    The mesh has one dimension, "shard", of as many ranks as there are shards. Ranks of
    torch.distributed are numbers of shards from now on. Groups of some of them cannot be made.

    Raises:
        AlreadyInitializedError: torch.distributed has a default group.
    """
    if dist.is_initialized():
        raise AlreadyInitializedError(
            "torch.distributed has a default group; with elastic.Replicas, leave its "
            "init_process_group to shard_mesh"
        )
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu"])
    _worlds.append(replicas.shard_group)
    try:
        dist.init_process_group(
            _BACKEND, store=dist.HashStore(), rank=replicas.shard, world_size=replicas.shards
        )
    finally:
        _worlds.clear()
    return init_device_mesh("cpu", (replicas.shards,), mesh_dim_names=("shard",))


_worlds: list[ProcessGroup] = []  # the group of the world that is being made


def _create(options: Any, _: object) -> Any:  # noqa: ANN401 - of torch
    if not _worlds:
        raise InvalidArgumentError(
            "torch.distributed's groups of some ranks of a replica are not formed again after a "
            "loss; use rallypoint.new_group, in elastic.State.on_reset"
        )
    return wrap_group(_worlds[0], options)


class HybridShard(UpdateParticipant):
    """A model under fully_shard, whose gradients are also reduced over elastic replicas.

        import rallypoint as dist
        from rallypoint import elastic
        from rallypoint.pytorch.elastic import HybridShard, shard_mesh

        dist.init_process_group()
        replicas = elastic.Replicas(shards=2)
        mesh = shard_mesh(replicas)
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        model = HybridShard(net, replicas, average=False)
        optimizer = torch.optim.AdamW(net.parameters())
        state = elastic.State(step=0, model=model, optimizer=optimizer)

        @elastic.run
        def train(state):
            while state.step < steps:
                mine = sampler.indices(state.step)
                optimizer.zero_grad()
                loss = criterion(model(inputs[mine]), labels[mine]).sum() / sampler.global_batch
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                with state.update():
                    optimizer.step()
                    state.step += 1

    The model and the module in it are called alike. When a rank is lost, forward or backward
    raises, and `elastic.run` retries the step without gradients. A newcomer gets its shard,
    and nothing else, from the ranks of other replicas that hold the same one.

    Build the model before `init_process_group`, which is where a spare waits, and shard it after.

    Args:
        module: fully_shard has been applied to it, with a mesh of `shard_mesh`.
        replicas: the ranks.
        average: gradients are averaged over all ranks that train, as PyTorch does. False: they are
            summed, for a loss that is a sum over this rank's samples divided by the global batch.
        broadcast_buffers: each update has all ranks take over the first rank's buffers. False: keep
            them equal yourself; they are part of the state.

    Raises:
        InvalidArgumentError: fully_shard has not been applied to the module, or on another mesh; or
            PyTorch is older than 2.13.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        replicas: Replicas,
        *,
        average: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        _check(module, replicas)
        self.module = module
        self._replicas = replicas
        self._op = ReduceOp.AVG if average else ReduceOp.SUM
        self._buffers_at_update = Buffers(are_broadcast=broadcast_buffers)
        self._has_begun = False  # to train; before, there is nothing to undo
        for each in _sharded(module):
            each.set_all_reduce_hook(self._reduce)
            if not average:
                each.set_gradient_divide_factor(1.0)
                each.set_force_sum_reduction_for_comms(True)
        module.register_forward_pre_hook(self._begin, prepend=True)

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401
        """The module's forward."""
        return self.module(*inputs, **named)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the module's."""
        shard: dict[str, Any] = self.module.state_dict()
        return shard

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on a rank with the same shard."""
        self.module.load_state_dict(state)

    def prepare(self) -> None:
        self._buffers_at_update.prepare(self.module.buffers(), self._replicas.group)

    def commit(self) -> None:
        self._buffers_at_update.commit(self.module.buffers())

    def rollback(self) -> None:
        if self._has_begun:
            _end_gathers(self.module)
            root: Any = self.module
            root.reset_iter_state()
            _forget_gradients(self.module)
        for parameter in self.module.parameters():
            parameter.grad = None
        self._buffers_at_update.rollback(self.module.buffers())

    def _begin(self, *_: object) -> None:
        self._buffers_at_update.check_committed()
        self._has_begun = True

    def _reduce(self, gradients: torch.Tensor) -> None:
        if self._replicas.position.replicas > 1:
            all_reduce(gradients, self._op, group=self._replicas.replicate_group)


def _sharded(module: torch.nn.Module) -> Iterator[Any]:
    return (each for each in module.modules() if isinstance(each, FSDPModule))


def _parameter_groups(module: torch.nn.Module) -> Iterator[Any]:
    for each in _sharded(module):
        yield from each._get_fsdp_state()._fsdp_param_groups


def _end_gathers(module: torch.nn.Module) -> None:
    """Of a pass that failed: PyTorch would wait for these works once more, and they raise again."""
    for group in _parameter_groups(module):
        result = group._all_gather_result
        if result is not None and result.all_gather_work is not None:
            with suppress(RallypointError):
                result.all_gather_work.wait()
            group._all_gather_result = result._replace(all_gather_work=None)


def _forget_gradients(module: torch.nn.Module) -> None:
    """Of parameters that were whole when the pass failed: the next one would add to them."""
    for group in _parameter_groups(module):
        for each in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(each):  # before PyTorch 2.15
                each.unsharded_accumulated_grad = None
            whole = getattr(each, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def _check(module: torch.nn.Module, replicas: Replicas) -> None:
    if not isinstance(module, FSDPModule):
        raise InvalidArgumentError(
            f"HybridShard takes a module to which fully_shard has been applied, not a "
            f"{type(module).__name__}"
        )
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise InvalidArgumentError(
            f"HybridShard needs PyTorch 2.13 or newer, and this is {torch.__version__}"
        )
    for name, parameter in module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or mesh.device_type != "cpu" or mesh.shape != (replicas.shards,):
            raise InvalidArgumentError(
                f"parameter {name} is not sharded over a mesh of shard_mesh(replicas); pass that "
                "to each fully_shard"
            )
