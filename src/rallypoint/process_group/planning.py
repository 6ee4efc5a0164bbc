"""From a call to the encoded program that serves it: choose, build, encode. Pure."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.schedule.catalogue import Team
from rallypoint.schedule.choose import build, choose
from rallypoint.schedule.custom import Custom
from rallypoint.schedule.encode import encode
from rallypoint.schedule.links import LinkModel
from rallypoint.schedule.program import Collective, Program
from rallypoint.schedule.widen import widen

COLLECTIVE_NAMES = tuple(collective.name.lower() for collective in Collective)


def planner(
    *,
    rank: int,
    ranks: int,
    override: str = "",
    custom: Custom | None = None,
    model: LinkModel | None = None,
) -> Callable[[int, int, int, bool], tuple[bytes, bool]]:
    """A function from (collective, root, bytes, uneven) to this rank's encoded program.

    With it comes whether every reduction of several operands has the inputs of all ranks, so that
    averages can be taken there. Blocks of different lengths are served by the direct algorithms. A
    send or receive is a program of two ranks, and `root` says which of them this rank is.
    What is chosen follows from arguments that are the same on every rank.

    Args:
        override: an algorithm for each collective that has it.
        custom: an algorithm of the user's, for the collective that it is for; rank 0 proves it.
        model: link constants, for a choice by predicted time.
    """

    def program(
        collective: Collective, root: int, nbytes: int, uneven: bool
    ) -> tuple[Program, bool]:
        if uneven:
            name = choose(collective, nbytes=nbytes, ranks=ranks, override="direct").algorithm
            return build(collective, name, ranks=ranks, root=root), True
        if custom is not None:
            made = custom.build(Team(ranks, root, ranks), prove=rank == 0)
            if made.collective is collective:
                return made, False
        choice = choose(collective, nbytes=nbytes, ranks=ranks, model=model, override=override)
        made = build(collective, choice.algorithm, ranks=ranks, root=root)
        return widen(made, choice.ways), choice.algorithm.startswith("direct")

    def plan(number: int, root: int, nbytes: int, uneven: bool) -> tuple[bytes, bool]:
        collective = Collective(number)
        if collective is Collective.SEND:
            return encode(build(collective, "direct", ranks=2), root), False
        made, is_direct = program(collective, root, nbytes, uneven)
        return encode(made, rank), is_direct

    return plan
