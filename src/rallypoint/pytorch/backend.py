"""The backend "rallypoint": how PyTorch creates a group, in the form that its version expects."""

from __future__ import annotations

from typing import Any

from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.pytorch import batches
from rallypoint.pytorch.formation import form, without_members
from rallypoint.pytorch.lone_group import LoneGroup
from rallypoint.pytorch.versions import HAS_BACKENDS, attach_recorders_ourselves, check


def create(options: Any, _: object) -> Any:  # noqa: ANN401 - of torch
    """Create a group from the arguments that PyTorch gives to the creator of a backend; all members
    call it.
    """
    check()
    attach_recorders_ourselves()
    batches.install()
    if HAS_BACKENDS and options.enable_reconfigure:
        formed = without_members(
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout,
            name=str(options.group_id),
        )
        return wrapped(formed, options)
    group = form(
        options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout,
        name=str(options.group_id),
        global_ranks=list(options.global_ranks_in_group),
    )
    return wrapped(group, options)


def wrapped(group: ProcessGroup, options: Any) -> Any:  # noqa: ANN401 - of torch
    """PyTorch's group over one of the engine."""
    if not HAS_BACKENDS:
        return LoneGroup(group, options.store)
    # Its backend's class does not exist before.
    from rallypoint.pytorch.rallypoint_group import RallypointGroup

    return RallypointGroup(group, options.store, options.process_group)
