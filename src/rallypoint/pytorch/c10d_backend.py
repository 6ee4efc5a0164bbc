"""The backend below a group, which C++ calls, in versions of PyTorch that allow one in Python.

Calls arrive from c10d's operators in C++, and from code that has no group in Python. C++ uses only
`wait` and `get_future` of a Work, so the result of a call is passed to the calling group
(routes.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from rallypoint.process_group.calls.collectives import monitored_barrier
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch.device_groups import DeviceGroups
from rallypoint.pytorch.events import recorded
from rallypoint.pytorch.operations import Operations
from rallypoint.pytorch.routes import hand
from rallypoint.pytorch.untraced import untraced


@untraced
class RallypointBackend(Operations, c10d.Backend):
    """The backend of one group, for C++; for versions of torch in which it can be written in
    Python.
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
    is_watched = True  # calls that come this way want to be seen

    def __init__(self, group: ProcessGroup, devices: DeviceGroups, above: Any) -> None:  # noqa: ANN401
        c10d.Backend.__init__(self, group.own_rank, group.size())
        self._above = weakref.ref(above)
        self.engine_group = group
        self.devices = devices

    def detour(
        self, method: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - a Work
        """Record the call as an event for the profiler, if one runs."""
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
        """The options that torch expects of any backend."""
        options = c10d.Backend.Options(self.engine_group.backend, self.engine_group.timeout)
        options.global_ranks_in_group = list(self.engine_group.ranks)
        options.group_name = self.engine_group.group_name
        return options

    def get_reconfigure_handle(self) -> str:
        """That of the group above."""
        return self._group_above().get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> Any:  # noqa: ANN401 - of torch
        """Have the group above reconfigured; this backend stays in use."""
        return self._group_above().reconfigure(opts)

    def _group_above(self) -> Any:  # noqa: ANN401 - RallypointGroup
        above = self._above()
        assert above is not None, "calls come by way of it"
        return above

    def supports_tensor_alloc(self, _: object) -> bool:
        """Nothing to support: tensors may be anywhere."""
        return False

    def get_error(self) -> Any:  # noqa: ANN401 - of torch
        """No error to report: errors are raised by calls, also after a reconfiguration."""
        return c10d.ErrorType.SUCCESS

    def eager_connect_single_device(self, _: object) -> None:
        """Nothing to do: all ranks are connected."""

    def perform_nocolor_split(self, _: object) -> None:
        """Nothing to do for ranks that are in no part."""

    def start_coalescing(self) -> None:
        """Nothing to do: the group does that."""

    def end_coalescing(self) -> None:
        """Nothing to do: the group does that."""

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:  # noqa: ANN401
        """Wait until all ranks have called this; see BaseGroup."""
        is_set = opts.timeout > timedelta(0)
        monitored_barrier(self.engine_group, opts.timeout if is_set else None, wait_all_ranks)
