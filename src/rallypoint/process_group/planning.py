"""From a call to the encoded program that serves it: choose, build, encode. Pure."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.schedule.choose import build, choose
from rallypoint.schedule.encode import encode
from rallypoint.schedule.program import Collective

COLLECTIVE_NAMES = tuple(collective.name.lower() for collective in Collective)


def planner(*, rank: int, ranks: int, override: str) -> Callable[[int, int, int], bytes]:
    """A function from (collective, root, bytes) to this rank's encoded program.

    A send or receive is a program of two ranks, and `root` says which of them this rank is.
    """

    def plan(number: int, root: int, nbytes: int) -> bytes:
        collective = Collective(number)
        if collective is Collective.SEND:
            choice = choose(collective, nbytes=nbytes, ranks=2)
            return encode(build(collective, choice.algorithm, ranks=2), root)
        choice = choose(collective, nbytes=nbytes, ranks=ranks, override=override)
        return encode(build(collective, choice.algorithm, ranks=ranks, root=root), rank)

    return plan
