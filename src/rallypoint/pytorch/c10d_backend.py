"""The backend below a group, which C++ calls, in versions of PyTorch that allow one in Python.

Calls arrive from c10d's operators in C++, and from code that has no group in Python. C++ uses only
`wait` and `get_future` of a Work, so the result of a call is passed to the calling group
(routes.py).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from rallypoint.process_group.calls.collectives import monitored_barrier
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.devices import Devices
from rallypoint.pytorch.events import recorded
from rallypoint.pytorch.operations import Operations
from rallypoint.pytorch.routes import hand
from rallypoint.pytorch.untraced import untraced


@untraced
class RallypointBackend(Operations, c10d.Backend):
    """The backend of one group, for C++; where torch lets one be written in Python."""

    # C++ would ask this class for what is missing here, again and again.
    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False
    supports_completion_hooks = False
    supports_time_estimate = False
    _supports_time_estimate = False
    is_watched = True  # who comes this way wants to see

    def __init__(self, group: ProcessGroup, devices: Devices) -> None:
        c10d.Backend.__init__(self, group.own_rank, group.size())
        self.engine_group = group
        self.devices = devices

    def detour(
        self, method: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - a Work
        """As an event for the profiler, if there is one."""
        return hand(
            recorded(
                self.engine_group,
                method.__name__,
                given,
                lambda: method(self, *given, **named),
            )
        )

    @property
    def options(self) -> Any:  # noqa: ANN401 - of torch
        """What torch asks of any backend."""
        options = c10d.Backend.Options(self.engine_group.backend, self.engine_group.timeout)
        options.global_ranks_in_group = list(self.engine_group.ranks)
        options.group_name = self.engine_group.group_name
        return options

    def supports_tensor_alloc(self, _: object) -> bool:
        """Tensors lie anywhere."""
        return False

    def get_error(self) -> Any:  # noqa: ANN401 - of torch
        """Errors are raised."""
        return c10d.ErrorType.SUCCESS

    def eager_connect_single_device(self, _: object) -> None:
        """All ranks are connected."""

    def perform_nocolor_split(self, _: object) -> None:
        """Who is not in a part has nothing to do with it."""

    def start_coalescing(self) -> None:
        """The group does that."""

    def end_coalescing(self) -> None:
        """The group does that."""

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:  # noqa: ANN401
        """Wait until all ranks have come here; see BaseGroup."""
        is_set = opts.timeout > timedelta(0)
        monitored_barrier(self.engine_group, opts.timeout if is_set else None, wait_all_ranks)
