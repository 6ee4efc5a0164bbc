"""Leaves groups: one, or all when the process exits, but not in a forked child."""

from __future__ import annotations

import atexit
import os
import weakref

from rallypoint.engine import engine_work as _work  # noqa: F401 - see leave_at_exit
from rallypoint.process_group.groups.group import ProcessGroup

_leaving_at_exit = weakref.WeakSet[ProcessGroup]()


def leave(group: ProcessGroup) -> None:
    """Leave a group; with a default group, also those created from it."""
    world = group.world
    if group.is_world:
        world.destroy()
    else:
        group.destroy()
        world.subgroups[:] = [each for each in world.subgroups if each is not group]


def leave_at_exit(group: ProcessGroup) -> None:
    """Leave at exit, so that a rank that just ends does not look like one that died.

    Exit handlers run in reverse order of import: engine.work, imported above for this reason, then
    runs the callbacks of operations that leaving has ended.
    """
    try:
        if not _leaving_at_exit:
            atexit.register(_leave_all)
        _leaving_at_exit.add(group)
    except BaseException:  # an interrupt: nobody else holds it yet who would leave it
        group.destroy()
        raise


def _leave_all() -> None:
    for group in list(_leaving_at_exit):
        leave(group)


def _abandon_all() -> None:
    for group in list(_leaving_at_exit):
        group.abandon()


os.register_at_fork(after_in_child=_abandon_all)
