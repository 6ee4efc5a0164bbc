"""From a call to the encoded program that serves it: choose, build, encode. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rallypoint.schedule.catalogue import Team
from rallypoint.schedule.choose import build, choose
from rallypoint.schedule.custom import Custom
from rallypoint.schedule.encode import encode
from rallypoint.schedule.links import LinkModel
from rallypoint.schedule.program import Collective, Program
from rallypoint.schedule.widen import widen

# (collective, root, bytes, whether blocks differ in length) -> this rank's encoded program, and
# whether reductions of several operands have the inputs of all ranks.
Planner: TypeAlias = Callable[[int, int, int, bool], tuple[bytes, bool]]


@dataclass(frozen=True, slots=True)
class Wishes:
    """How programs are to be chosen, unless as always; the same on all ranks of a group.

    Attributes:
        override: an algorithm's name, or the file of one's own.
        model_text: a link model, as `schedule.links.parse_model` reads it.
    """

    override: str = ""
    model_text: str = ""


COLLECTIVE_NAMES = tuple(collective.name.lower() for collective in Collective)


def planner(
    *,
    rank: int,
    ranks: int,
    per_host: int = 0,
    override: str = "",
    custom: Custom | None = None,
    model: LinkModel | None = None,
) -> Planner:
    """What makes the programs of a rank.

    What is chosen follows from arguments that are the same on every rank. Blocks of different
    lengths are served by the direct algorithms, which every rank can run without knowing all.

    Args:
        per_host: how many consecutive ranks share a host; 0 if all do.
        override: an algorithm for each collective that has it.
        custom: an algorithm of the user's, for the collective that it is for; rank 0 proves it.
        model: link constants, for a choice by predicted time.
    """

    def own(collective: Collective, root: int) -> Program | None:
        made = custom and custom.build(Team(ranks, root, per_host or ranks), prove=rank == 0)
        return made if made and made.collective is collective else None

    def plan(number: int, root: int, nbytes: int, uneven: bool) -> tuple[bytes, bool]:
        collective = Collective(number)
        made = None if uneven else own(collective, root)
        if made is not None:
            return encode(made, rank), False
        wish = "direct" if uneven else override
        choice = choose(
            collective,
            nbytes=nbytes,
            ranks=ranks,
            per_node=per_host,
            model=model,
            override=wish,
        )
        made = build(collective, choice.algorithm, ranks=ranks, root=root, per_node=per_host or 1)
        return encode(widen(made, choice.ways), rank), choice.algorithm.startswith("direct")

    return plan


def ranks_per_host(hosts: Sequence[int]) -> int:
    """How many consecutive ranks share a host, if that is so; the last host may have fewer.

    0 if all ranks are on one host; 1 if they are spread in any other way, as if each were alone.
    """
    if len(set(hosts)) == 1:
        return 0
    size = hosts.count(hosts[0])
    regular = [rank // size for rank in range(len(hosts))]
    return size if list(hosts) == regular else 1
