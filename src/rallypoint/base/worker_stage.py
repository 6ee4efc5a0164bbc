"""How far a worker is in its job's rounds: one table, for the worker and its agent.

    SPARE --> READY --> ASSIGNED --> JOINED --> SYNCHRONIZED --> LEAVING --> LEFT
                           ^------------------------------------------'

SPARE: on standby, without a place. READY: it waits for one. ASSIGNED: it knows its place in a
round; a worker that was started with a rank begins so. JOINED: it has formed the round's group.
SYNCHRONIZED: all of that group have the state. LEAVING: it has done its last update, and asks its
agent whether others still need it: a place in a newer round says so. LEFT: they do not.
"""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """Within a round, a later stage is a higher number."""

    SPARE = 0
    READY = 1
    ASSIGNED = 2
    JOINED = 3
    SYNCHRONIZED = 4
    LEAVING = 5
    LEFT = 6


STAGES = Stage.__members__
_MOVES: dict[Stage, tuple[Stage, ...]] = {
    Stage.SPARE: (Stage.READY,),
    Stage.READY: (Stage.ASSIGNED,),
    Stage.ASSIGNED: (Stage.ASSIGNED, Stage.JOINED),
    Stage.JOINED: (Stage.ASSIGNED, Stage.JOINED, Stage.SYNCHRONIZED),
    Stage.SYNCHRONIZED: (Stage.ASSIGNED, Stage.JOINED, Stage.SYNCHRONIZED, Stage.LEAVING),
    Stage.LEAVING: (Stage.ASSIGNED, Stage.LEFT),
    Stage.LEFT: (Stage.JOINED,),  # in another function under elastic.run
}


def move(before: Stage, to: Stage) -> Stage:
    """The stage after that one.

    Raises:
        RuntimeError: it cannot be.
    """
    if to not in _MOVES[before]:
        raise RuntimeError(f"a worker cannot go from {before.name} to {to.name}")
    return to
