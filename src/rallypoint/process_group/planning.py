"""From a call to the encoded program that serves it: choose, build, encode. Pure."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.schedule.choose import build, choose
from rallypoint.schedule.encode import encode
from rallypoint.schedule.program import Collective

COLLECTIVE_NAMES = tuple(collective.name.lower() for collective in Collective)


def planner(
    *, rank: int, ranks: int, override: str
) -> Callable[[int, int, int, bool], tuple[bytes, bool]]:
    """A function from (collective, root, bytes, uneven) to this rank's encoded program.

    With it comes whether every reduction of several operands has the inputs of all ranks, so that
    averages can be taken there. Blocks of different lengths are served by the direct algorithms. A
    send or receive is a program of two ranks, and `root` says which of them this rank is.
    """

    def plan(number: int, root: int, nbytes: int, uneven: bool) -> tuple[bytes, bool]:
        collective = Collective(number)
        if collective is Collective.SEND:
            choice = choose(collective, nbytes=nbytes, ranks=2)
            return encode(build(collective, choice.algorithm, ranks=2), root), False
        wish = "direct" if uneven else override
        name = choose(collective, nbytes=nbytes, ranks=ranks, override=wish).algorithm
        program = build(collective, name, ranks=ranks, root=root)
        return encode(program, rank), name.startswith("direct")

    return plan
