"""Picks the algorithm for a call, and says why."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.schedule.catalogue import ALGORITHMS as ALGORITHMS  # noqa: PLC0414 - re-exported
from rallypoint.schedule.catalogue import build as build  # noqa: PLC0414
from rallypoint.schedule.program import Collective

ONE_SHOT_BYTES = 16 * 1024  # above it, reducing everything on every rank costs more than waiting
FEW_RANKS = 16  # beyond, talking to all peers costs more than passing on


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm by name, and the reason for it."""

    algorithm: str
    reason: str


def choose(collective: Collective, *, nbytes: int, ranks: int, override: str = "") -> Choice:
    """Choose the algorithm for a call of `nbytes` bytes per rank.

    Args:
        override: an algorithm's name, used for each collective that has it; empty for none.
    """
    if override in ALGORITHMS[collective]:
        return Choice(override, "asked for")
    if collective is not Collective.ALL_REDUCE:
        return Choice("direct", "the only one measured so far")
    if ranks <= 2:
        return Choice("direct_one_shot", "with two ranks, one step moves no more than two")
    if nbytes <= ONE_SHOT_BYTES:
        return Choice("direct_one_shot", f"up to {ONE_SHOT_BYTES} bytes, waiting costs the most")
    if ranks <= FEW_RANKS:
        return Choice("direct_two_shot", "each byte is reduced once, by one rank")
    return Choice("ring", f"beyond {FEW_RANKS} ranks, few neighbours beat few steps")


def check_override(name: str) -> None:
    """Raise InvalidArgumentError if no collective has an algorithm of this name."""
    known = sorted({name for algorithms in ALGORITHMS.values() for name in algorithms})
    if name and name not in known:
        raise InvalidArgumentError(
            f"there is no algorithm {name!r}; RALLYPOINT_ALGORITHM may be one of {', '.join(known)}"
        )
