"""The process group for PyTorch 2.14 and newer; base_group.py has that for earlier versions.

Two groups share one backend. Programs have ours, whose calls go directly to the engine while no
tool observes them. Otherwise they pass `torchs`, a group of torch's own, whose dispatcher shows
them to hooks, recorders and dispatch modes, and calls the backend of the tensors' device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.base_group import BaseGroup
from rallypoint.pytorch.device_groups import BackendType, DeviceGroups
from rallypoint.pytorch.operations import Operations
from rallypoint.pytorch.tools import (
    Method,
    kind_given,
    publish_work,
    published_work,
    recorded,
    untraced,
)
from rallypoint.pytorch.torch_work import DoneWork
from rallypoint.pytorch.versions import (
    attach_flight_recorder,
    attach_nan_check,
    wants_nan_check,
    wrapped_for_debugging,
)

if TYPE_CHECKING:
    from rallypoint.pytorch.reconfiguration import Reconfiguration


@untraced
class RallypointBackend(Operations, c10d.Backend):
    """The backend of one group, for C++; torch has it in Python from 2.14 on.

    Calls arrive from c10d's operators in C++, and from code that has no group in Python. C++ uses
    only `wait` and `get_future` of a Work, so the result of a call is passed to the calling group
    (tools.py).
    """

    # Without these, C++ would look them up in this class again and again.
    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = True
    supports_window = False
    supports_abort_hooks = False
    supports_completion_hooks = False
    supports_time_estimate = False
    _supports_time_estimate = False
    is_watched = True  # a tool sees the calls that come here

    def __init__(self, group: ProcessGroup, devices: DeviceGroups, above: RallypointGroup) -> None:
        c10d.Backend.__init__(self, group.own_rank, group.size())
        self._above = weakref.ref(above)
        self.engine_group = group
        self.devices = devices

    def detour(self, method: Method, given: tuple[Any, ...], named: dict[str, Any]) -> dist.Work:
        """Record the call as an event for the profiler, if one runs."""
        return publish_work(recorded(method, self, given, named))

    @property
    def options(self) -> c10d.Backend.Options:
        """The options that torch expects of any backend."""
        options = c10d.Backend.Options(self.engine_group.backend, self.engine_group.timeout)
        options.global_ranks_in_group = list(self.engine_group.ranks)
        options.group_name = self.engine_group.group_name
        return options

    def get_reconfigure_handle(self) -> str:
        """The handle of the group above."""
        return self._group_above().get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> dist.Work:  # noqa: ANN401 - new in torch 2.14
        """Have the group above reconfigured; this backend stays in use."""
        return self._group_above().reconfigure(opts)

    def _group_above(self) -> RallypointGroup:
        above = self._above()
        assert above is not None, "calls come by way of it"
        return above

    def supports_tensor_alloc(self, _: object) -> bool:
        """Nothing to support: tensors may be anywhere."""
        return False

    def get_error(self) -> c10d.ErrorType:
        """No error to report: errors are raised by calls, also after a reconfiguration."""
        return c10d.ErrorType.SUCCESS

    def eager_connect_single_device(self, _: object) -> None:
        """Nothing to do: all ranks are connected."""

    def perform_nocolor_split(self, _: object) -> None:
        """Nothing to do for ranks that are in no part."""

    def start_coalescing(self) -> None:
        """Nothing to do: the group does that."""

    end_coalescing = start_coalescing

    def monitored_barrier(self, opts: c10d.BarrierOptions, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called this; see BaseGroup."""
        is_set = opts.timeout > timedelta(0)
        from rallypoint.process_group.calls.collectives import monitored_barrier

        monitored_barrier(self.engine_group, opts.timeout if is_set else None, wait_all_ranks)


_NOT_OF_BACKENDS = {"gather_single"}  # C++ does not look for it in a backend in Python


@untraced
class RallypointGroup(BaseGroup, dist.ProcessGroup):
    """A group of ranks over a backend.

    `torchs` is a group that torch has made for the same ranks; one is made unless given.
    """

    supports_reconfigure = True

    def __init__(
        self, group: ProcessGroup, store: dist.Store, torchs: dist.ProcessGroup | None = None
    ) -> None:
        dist.ProcessGroup.__init__(self, store, group.own_rank, group.size())
        BaseGroup.__init__(self, group, store)
        self.torchs = torchs or dist.ProcessGroup(store, group.own_rank, group.size())
        self._set_default_backend(BackendType.CUSTOM)
        self.bound_device_id = self.torchs.bound_device_id
        self._make_backend()
        for device in self.torchs._device_types:  # of another backend, named before ours
            theirs = self.torchs._get_backend(device)
            kind = getattr(BackendType, theirs.name().upper(), BackendType.CUSTOM)
            self._register_backend(device, kind, theirs)
            self.devices.add(device.type, self.torchs)
        self.adopt("cpu", BackendType.CUSTOM, self._below)
        self._hooks: dict[tuple[str, int], Callable[[Any], None]] = {}
        self._recorder: Any = None
        self._rounds: Reconfiguration | None = None  # once it is to be reconfigured
        self._update_watched()

    def _make_backend(self) -> None:
        group = self.engine_group
        self.torchs._set_default_backend(BackendType.CUSTOM)
        self.backend = RallypointBackend(group, self.devices, self)
        self._below = wrapped_for_debugging(self.backend, self.store, group)
        self._is_wrapped = self._below is not self.backend

    def adopt(self, kind: str, code: BackendType, backend: c10d.Backend) -> dist.ProcessGroup:
        """See BaseGroup; it lies beside ours from now on."""
        for each in (self, self.torchs):
            each._register_backend(torch.device(kind), code, backend)
        return self.torchs

    def detour(self, method: Method, given: tuple[Any, ...], named: dict[str, Any]) -> dist.Work:
        """Make the call through torch's dispatcher, on the backend of the tensors' device."""
        name = method.__name__
        kind = kind_given(given)
        group = self.torchs if kind is None else self.devices.group_for(kind)
        if group is None or name in _NOT_OF_BACKENDS:
            return self.note_work(self.backend.detour(method, given, named))
        return self.note_work(published_work(lambda: getattr(group, name)(*given, **named)))

    def has_watchers(self) -> bool:
        return bool(self._hooks or self._recorder or self._is_wrapped or wants_nan_check())

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
        that begin with it: exchange it only where you trust all readers.
        """
        return self._reconfiguration().handle()

    def reconfigure(self, opts: Any) -> DoneWork:  # noqa: ANN401 - new in torch 2.14
        """Give the group the members of `opts.handles`, in their order; all of them call it.

        Calls under way end with an error; subgroups, and meshes of them, are to be made again. It
        returns once the group is formed.

        Args:
            opts: torch's ReconfigureOptions. `uuid` is a number that no round of this group has
                had; `timeout` says how long forming may take, by default as long as a call;
                `hints` are ignored.
        """
        if self.devices.made():
            raise InvalidArgumentError(
                "reconfigure: only groups of CPU tensors can be reconfigured; this one also serves "
                "other devices"
            )
        group = self.engine_group
        self._reconfiguration().form(opts.uuid, opts.handles, opts.timeout or group.timeout)
        self.torchs = dist.ProcessGroup(self.store, group.own_rank, group.size())
        self.devices = DeviceGroups(group, self.store, self.adopt)
        self._make_backend()
        self.torchs._register_backend(torch.device("cpu"), BackendType.CUSTOM, self._below)
        self.torchs._set_group_name(self.group_name)
        self._attach_tools(self.group_desc)
        for (kind, hook_id), hook in list(self._hooks.items()):
            self._register_hook(kind, hook_id, hook)
        known = dist.distributed_c10d._world.pg_group_ranks
        if self in known:
            known[self] = {rank: rank for rank in group.ranks}
        return DoneWork(())

    def _end(self) -> None:
        super()._end()
        self.engine_group.world.release_store()
        if self._rounds is not None:
            self._rounds.close()

    def _reconfiguration(self) -> Reconfiguration:
        from rallypoint.pytorch.reconfiguration import Reconfiguration  # few groups are

        self._rounds = self._rounds or Reconfiguration(self.engine_group)
        return self._rounds

    # What torch reports to the group, and asks of it.

    def _set_group_name(self, name: str) -> None:
        dist.ProcessGroup._set_group_name(self, name)
        self.torchs._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        """Called after the name, and before the first call."""
        dist.ProcessGroup._set_group_desc(self, description)
        self._attach_tools(description)

    def _attach_tools(self, description: str) -> None:
        self.torchs._set_group_desc(description)
        ranks = list(self.engine_group.ranks)
        self._recorder = attach_flight_recorder(self.torchs, ranks)
        attach_nan_check(self.torchs)
        self._update_watched()

    get_backend = BaseGroup._get_backend

    def _register_hook(self, kind: str, hook_id: int, hook: Callable[[Any], None]) -> None:
        getattr(self.torchs, f"register_{kind}_hook")(hook_id, hook)
        self._hooks[kind, hook_id] = hook
        self._update_watched()

    def _unregister_hook(self, kind: str, hook_id: int) -> None:
        getattr(self.torchs, f"unregister_{kind}_hook")(hook_id)
        self._hooks.pop((kind, hook_id), None)
        self._update_watched()

    # Hooks see all calls, before or after they begin: calls then pass torch's dispatcher.
    register_pre_hook = partialmethod(_register_hook, "pre")
    unregister_pre_hook = partialmethod(_unregister_hook, "pre")
    register_post_hook = partialmethod(_register_hook, "post")
    unregister_post_hook = partialmethod(_unregister_hook, "post")
