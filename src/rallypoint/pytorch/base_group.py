"""Our process groups: what they have in common, and the form for PyTorch before 2.14.

rallypoint_group.py has the form for newer versions, where a backend lies below the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.buckets import shared_buckets
from rallypoint.pytorch.device_groups import BackendType, DeviceGroups
from rallypoint.pytorch.formation import form
from rallypoint.pytorch.operations import Operations
from rallypoint.pytorch.tools import Method, kind_given, recorded, untraced
from rallypoint.pytorch.torch_work import DoneWork, Running, joined
from rallypoint.pytorch.versions import method_of


@untraced
class BaseGroup(Operations):
    """A group of ranks; its classes also derive from torch's."""

    is_watched = False  # whether all calls are to pass torch's tools
    _below: Any = None  # torch's backend, if the group itself is none

    def __init__(self, group: ProcessGroup, store: dist.Store) -> None:
        self.engine_group = group
        self.store = store
        self.devices = DeviceGroups(group, store, self.adopt)
        self._coalesced: list[dist.Work] | None = None
        self._splits = 0
        self._is_over = False
        shared_buckets.add_group()

    def adopt(self, kind: str, code: BackendType, backend: c10d.Backend) -> dist.ProcessGroup:
        """Have a backend of torch's take calls with tensors on a kind of device, by a group."""
        raise NotImplementedError

    def get_group_store(self) -> dist.Store:
        """The store through which the members connected."""
        return self.store

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> dist.ProcessGroup | None:
        """Create a group of some of the ranks, which all call it; None if this one is not in it."""
        for rank in new_ranks:
            self._rank(rank, "split_group")
        if not new_ranks or len(set(new_ranks)) < len(new_ranks):
            raise InvalidArgumentError(f"split_group: {new_ranks=} must be ranks, each once")
        self._splits += 1
        own = self.engine_group
        if own.own_rank not in new_ranks:
            return None
        name = group_name or f"{own.group_name}:split:{self._splits}"
        parts = "_".join(map(str, new_ranks))
        store = dist.PrefixStore(f"split/{self._splits}/{parts}", self.store)
        formed = form(
            store,
            rank=list(new_ranks).index(own.own_rank),
            size=len(new_ranks),
            timeout=timeout or own.timeout,
            name=name,
            global_ranks=[own.ranks[rank] for rank in new_ranks],
        )
        group: Any = type(self)(formed, store)
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have called this; after `timeout`, say which have not.

        All ranks learn of all that are missing, whatever `wait_all_ranks` says. Before 2.14,
        torch.distributed.monitored_barrier supports only gloo; call this method instead.
        """
        from rallypoint.process_group.calls.collectives import monitored_barrier  # only for this

        monitored_barrier(self.engine_group, timeout, wait_all_ranks)

    # Coalesced calls.

    def _start_coalescing(self, device: torch.device) -> None:
        group = self.group_for(device)
        if group is not None:
            group._start_coalescing(device)
            return
        self._coalesced = []
        self._update_watched()

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        group = self.group_for(device)
        if group is not None:
            return group._end_coalescing(device)
        works = self._coalesced or []
        self.forget_coalesced()
        return joined(works, [output for work in works for output in work.result()])

    def forget_coalesced(self) -> None:
        """Calls are no longer coalesced; those begun continue."""
        self._coalesced = None
        self._update_watched()

    # The names by which C++ calls them.
    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def has_watchers(self) -> bool:
        """Whether a tool of torch's must see all calls."""
        return False

    def _update_watched(self) -> None:
        self.is_watched = self._coalesced is not None or self.has_watchers()

    def note_work(self, work: dist.Work) -> dist.Work:
        """Note a work that has just begun, in case _end_coalescing must wait for it."""
        if self._coalesced is not None and isinstance(work, DoneWork | Running):
            self._coalesced.append(work)
        return work

    def group_for(self, device: torch.device) -> dist.ProcessGroup | None:
        """The group that takes calls with tensors on a device; None if it is this one."""
        kind = torch.device(device).type
        return None if kind == "cpu" else self.devices.group_for(kind)

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ANN401 - a backend, or this
        # torch also asks when no GPU is used, or peers may be gone: make no group for that.
        device = torch.device(device)
        group = self.devices.group_made(device.type)
        return (self._below or self) if group is None else group._get_backend(device)

    # Its end.

    def abort(self) -> None:
        """End the waits of all ranks of the group with an error, and leave it."""
        super().abort()
        for group in self.devices.made():
            group.abort()
        if not self.engine_group.forms_again:
            self._end()

    def shutdown(self) -> None:
        """Leave the group; peers that wait for this rank get an error."""
        super().shutdown()
        for group in self.devices.made():
            group.shutdown()
        self._end()

    def _end(self) -> None:
        """End the group, only once."""
        if not self._is_over:
            self._is_over = True
            self.devices.close()
            shared_buckets.remove_group()


@untraced
class LoneGroup(BaseGroup, dist.ProcessGroup):
    """A group before PyTorch 2.14, which also answers what torch asks of a backend.

    Calls do not pass torch's dispatcher, which requires a backend in C++; profilers get our events.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def __init__(self, group: ProcessGroup, store: dist.Store) -> None:
        dist.ProcessGroup.__init__(self, group.own_rank, group.size())
        BaseGroup.__init__(self, group, store)
        self._name = group.group_name
        self._description = "undefined"

    def adopt(self, kind: str, code: BackendType, backend: c10d.Backend) -> dist.ProcessGroup:
        """See BaseGroup; returns a group of torch's on top of the backend."""
        group = self.engine_group
        whole = dist.ProcessGroup(self.store, group.own_rank, group.size())
        whole._set_default_backend(code)
        whole._register_backend(torch.device(kind), code, backend)
        whole._set_group_name(f"{group.group_name}:{kind}")
        return whole

    def detour(self, method: Method, given: tuple[Any, ...], named: dict[str, Any]) -> dist.Work:
        """Make the call on the group of its tensors' device, or record it for the profiler."""
        kind = kind_given(given)
        if kind is not None and (group := self.devices.group_for(kind)) is not None:
            return method_of(group, method.__name__)(*given, **named)
        return self.note_work(recorded(method, self, given, named))

    # What torch asks for, and would otherwise ask a backend in C++ for.

    def getGroupName(self) -> str:  # noqa: N802 - torch's names, here and below
        """The name by which the members found each other."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called once by torch."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The caller's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Called once by torch."""
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _has_hooks(self) -> bool:
        return False
