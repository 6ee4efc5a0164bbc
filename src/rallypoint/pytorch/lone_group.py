"""The process group for PyTorch before 2.14: it *is* the group, with no backend below it.

Calls then do not pass torch's dispatcher, which requires a backend in C++. For a profiler, we
record our own events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.base_group import BaseGroup
from rallypoint.pytorch.tools import kind_given, recorded, untraced
from rallypoint.pytorch.versions import method_of


@untraced
class LoneGroup(BaseGroup, dist.ProcessGroup):
    """A group of ranks; it also answers what torch asks of a backend."""

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def __init__(self, group: ProcessGroup, store: Any) -> None:  # noqa: ANN401 - of torch
        dist.ProcessGroup.__init__(self, group.own_rank, group.size())
        BaseGroup.__init__(self, group, store)
        self._name = group.group_name
        self._description = "undefined"

    def adopt(self, kind: str, backend_type: Any, backend: Any) -> Any:  # noqa: ANN401 - of torch
        """See BaseGroup; returns a group of torch's on top of the backend."""
        group = self.engine_group
        whole = dist.ProcessGroup(self.store, group.own_rank, group.size())
        whole._set_default_backend(backend_type)
        whole._register_backend(torch.device(kind), backend_type, backend)
        whole._set_group_name(f"{group.group_name}:{kind}")
        return whole

    def detour(
        self, method: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - a Work
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
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:  # noqa: ANN401
        # torch also asks when no GPU is used, or peers may be gone: make no group for that.
        group = self.devices.group_made(torch.device(device).type)
        return self if group is None else group._get_backend(device)

    def _has_hooks(self) -> bool:
        return False
