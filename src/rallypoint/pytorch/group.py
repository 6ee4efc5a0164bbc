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

from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.base_group import BaseGroup
from rallypoint.pytorch.c10d_backend import RallypointBackend
from rallypoint.pytorch.routes import handed, kind_given
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

    def __init__(self, group: ProcessGroup, store: Any, torchs: Any = None) -> None:  # noqa: ANN401
        dist.ProcessGroup.__init__(self, store, group.own_rank, group.size())
        self.enter(group, store)
        self.torchs = torchs or dist.ProcessGroup(store, group.own_rank, group.size())
        self.torchs._set_default_backend(_TYPES.CUSTOM)
        self._set_default_backend(_TYPES.CUSTOM)
        self.bound_device_id = self.torchs.bound_device_id
        self.backend = RallypointBackend(group, self.devices)
        self._below = wrapped_for_debugging(self.backend, store, group)
        self._is_wrapped = self._below is not self.backend
        for device in self.torchs._device_types:  # of another backend, named before ours
            theirs = self.torchs._get_backend(device)
            self._register_backend(device, _type_of(theirs), theirs)
            self.devices.add(device.type, self.torchs)
        for each in (self, self.torchs):
            each._register_backend(torch.device("cpu"), _TYPES.CUSTOM, self._below)
        self._hooks: set[tuple[str, int]] = set()
        self._recorder: Any = None
        self.is_watched = self.has_watchers()

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
        """See BaseGroup."""
        return bool(self._hooks or self._recorder or self._is_wrapped or is_nan_check_asked_for())

    # What torch tells the group of, and asks it for.

    def _set_group_name(self, name: str) -> None:
        dist.ProcessGroup._set_group_name(self, name)
        self.torchs._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        """Called after the name, and before the first call."""
        dist.ProcessGroup._set_group_desc(self, description)
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
        self._hook("pre", hook_id, is_there=True)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Undo register_pre_hook."""
        self.torchs.unregister_pre_hook(hook_id)
        self._hook("pre", hook_id, is_there=False)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Have all calls seen once they have begun; they go by way of torch from now on."""
        self.torchs.register_post_hook(hook_id, hook)
        self._hook("post", hook_id, is_there=True)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Undo register_post_hook."""
        self.torchs.unregister_post_hook(hook_id)
        self._hook("post", hook_id, is_there=False)

    def _hook(self, kind: str, hook_id: int, *, is_there: bool) -> None:
        (self._hooks.add if is_there else self._hooks.discard)((kind, hook_id))
        self.is_watched = self._coalesced is not None or self.has_watchers()


def _type_of(backend: Any) -> Any:  # noqa: ANN401 - of torch
    """What torch calls the type of one of its backends."""
    return getattr(_TYPES, backend.name().upper(), _TYPES.CUSTOM)
