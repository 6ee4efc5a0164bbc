"""The process group for PyTorch 2.14 and newer; lone_group.py has that of earlier versions.

Two groups share one backend. Programs hold ours: its calls go directly to the engine while no tool
observes. `torchs`, one of torch's own, leads through torch's dispatcher to the backend, or to those
of other devices, so that hooks, recorders and dispatch modes see the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.base_group import BaseGroup
from rallypoint.pytorch.c10d_backend import RallypointBackend
from rallypoint.pytorch.device_groups import DeviceGroups
from rallypoint.pytorch.reconfiguring import Reconfiguring
from rallypoint.pytorch.routes import handed, kind_given
from rallypoint.pytorch.torch_work import DoneWork
from rallypoint.pytorch.untraced import untraced
from rallypoint.pytorch.versions import (
    attach_flight_recorder,
    attach_nan_check,
    is_nan_check_asked_for,
    wrapped_for_debugging,
)

_TYPES = dist.ProcessGroup.BackendType
_NOT_OF_BACKENDS = {"gather_single"}  # C++ does not look for it in a backend in Python


@untraced
class RallypointGroup(BaseGroup, dist.ProcessGroup):
    """A group of ranks over a backend.

    Args:
        group: as the engine knows it.
        store: at which the members met.
        torchs: a group that torch has made for the same ranks; one is made unless given.

    Attributes:
        is_watched: all calls are to go by way of torch.
    """

    is_watched = False
    supports_reconfigure = True

    def __init__(self, group: ProcessGroup, store: Any, torchs: Any = None) -> None:  # noqa: ANN401
        dist.ProcessGroup.__init__(self, store, group.own_rank, group.size())
        self.enter(group, store)
        self.torchs = torchs or dist.ProcessGroup(store, group.own_rank, group.size())
        self._set_default_backend(_TYPES.CUSTOM)
        self.bound_device_id = self.torchs.bound_device_id
        self._make_backend()
        for device in self.torchs._device_types:  # of another backend, named before ours
            theirs = self.torchs._get_backend(device)
            self._register_backend(device, _type_of(theirs), theirs)
            self.devices.add(device.type, self.torchs)
        for each in (self, self.torchs):
            each._register_backend(torch.device("cpu"), _TYPES.CUSTOM, self._below)
        self._hooks: dict[tuple[str, int], Callable[[Any], None]] = {}
        self._recorder: Any = None
        self._reconfiguring = Reconfiguring(group)
        self.is_watched = self.has_watchers()

    def _make_backend(self) -> None:
        group = self.engine_group
        self.torchs._set_default_backend(_TYPES.CUSTOM)
        self.backend = RallypointBackend(group, self.devices, self)
        self._below = wrapped_for_debugging(self.backend, self.store, group)
        self._is_wrapped = self._below is not self.backend

    def adopt(self, kind: str, backend_type: Any, backend: Any) -> Any:  # noqa: ANN401 - of torch
        """See BaseGroup; it lies beside ours from now on."""
        for each in (self, self.torchs):
            each._register_backend(torch.device(kind), backend_type, backend)
        return self.torchs

    def detour(
        self, method: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - a Work
        """By way of torch's dispatcher to the backend of the tensors' device, as routes.py says."""
        name = method.__name__
        kind = kind_given(given)
        group = self.torchs if kind is None else self.devices.group_for(kind)
        if group is None or name in _NOT_OF_BACKENDS:
            return self.kept(self.backend.detour(method, given, named))
        return self.kept(handed(lambda: getattr(group, name)(*given, **named)))

    def has_watchers(self) -> bool:
        return bool(self._hooks or self._recorder or self._is_wrapped or is_nan_check_asked_for())

    # Its members, which may change.

    def rank(self) -> int:
        """This process's rank in the group."""
        return self.engine_group.own_rank

    def size(self) -> int:
        """The number of ranks in the group."""
        return self.engine_group.size()

    getRank, getSize = rank, size  # noqa: N815 - as C++ asks for them

    def get_reconfigure_handle(self) -> str:
        """Text by which other processes find this one in a call of reconfigure.

        It contains an address of this process, and a token. Any process that has it can join rounds
        that begin with it: exchange it in a place that you trust.
        """
        return self._reconfiguring.handle()

    def reconfigure(self, opts: Any) -> DoneWork:  # noqa: ANN401 - of torch
        """Give the group the members of `opts.handles`, in their order; all of them call it.

        Calls under way end with an error; subgroups, and meshes of them, are to be made again. It
        returns once the group is formed.

        Args:
            opts: torch's ReconfigureOptions. `uuid` is a number that no round of this group has
                had; `timeout` says how long forming may take, by default as long as a call;
                `hints` are ignored.

        Raises:
            InvalidArgumentError: one is no handle, or this group's is not among them; or the group
                serves devices besides the CPU.
            AlreadyInitializedError: the uuid was used before.
            StoreConnectionError, StoreTimeoutError, CollectiveTimeoutError, PeerLostError,
                HostError: as init_process_group. It may be called again.
        """
        if self.devices.made():
            raise InvalidArgumentError(
                "reconfigure: only groups of CPU tensors can be reconfigured; this one also serves "
                "other devices"
            )
        group = self.engine_group
        self._reconfiguring.form(opts.uuid, opts.handles, opts.timeout or group.timeout)
        self.torchs = dist.ProcessGroup(self.store, group.own_rank, group.size())
        self.devices = DeviceGroups(group, self.store, self.adopt)
        self._make_backend()
        self.torchs._register_backend(torch.device("cpu"), _TYPES.CUSTOM, self._below)
        self.torchs._set_group_name(self.group_name)
        self._attach(self.group_desc)
        for (kind, hook_id), hook in self._hooks.items():
            getattr(self.torchs, f"register_{kind}_hook")(hook_id, hook)
        known = dist.distributed_c10d._world.pg_group_ranks
        if self in known:
            known[self] = {rank: rank for rank in group.ranks}
        return DoneWork(())

    def _end(self) -> None:
        super()._end()
        self._reconfiguring.close()

    # What torch tells the group of, and asks it for.

    def _set_group_name(self, name: str) -> None:
        dist.ProcessGroup._set_group_name(self, name)
        self.torchs._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        """Called after the name, and before the first call."""
        dist.ProcessGroup._set_group_desc(self, description)
        self._attach(description)

    def _attach(self, description: str) -> None:
        self.torchs._set_group_desc(description)
        ranks = list(self.engine_group.ranks)
        self._recorder = attach_flight_recorder(self.torchs, ranks)
        attach_nan_check(self.torchs)
        self.is_watched = self.has_watchers()

    def _get_backend(self, device: Any) -> Any:  # noqa: ANN401
        # torch asks also where no GPU is used, and when peers may be gone: make nothing for that.
        group = self.devices.group_made(torch.device(device).type)
        return self._below if group is None else group._get_backend(torch.device(device))

    get_backend = _get_backend

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Have all calls seen before they begin; they go by way of torch from now on."""
        self.torchs.register_pre_hook(hook_id, hook)
        self._hook("pre", hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Undo register_pre_hook."""
        self.torchs.unregister_pre_hook(hook_id)
        self._hook("pre", hook_id)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Have all calls seen once they have begun; they go by way of torch from now on."""
        self.torchs.register_post_hook(hook_id, hook)
        self._hook("post", hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Undo register_post_hook."""
        self.torchs.unregister_post_hook(hook_id)
        self._hook("post", hook_id)

    def _hook(self, kind: str, hook_id: int, hook: Callable[[Any], None] | None = None) -> None:
        if hook is None:
            self._hooks.pop((kind, hook_id), None)
        else:
            self._hooks[kind, hook_id] = hook
        self.is_watched = self._coalesced is not None or self.has_watchers()


def _type_of(backend: Any) -> Any:  # noqa: ANN401 - of torch
    """What torch calls the type of one of its backends."""
    return getattr(_TYPES, backend.name().upper(), _TYPES.CUSTOM)
