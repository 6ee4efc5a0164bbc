"""Picks the algorithm for a call, and says why. The one list of all built-in algorithms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.schedule.algorithms import (
    binary_tree,
    binomial,
    bruck,
    direct,
    double_tree,
    halving_doubling,
    hierarchical,
    ring,
)
from rallypoint.schedule.program import Collective, Program


@dataclass(frozen=True, slots=True)
class Team:
    """For whom a program is: how many ranks, which is the root, how many on each node."""

    ranks: int
    root: int = 0
    per_node: int = 1


ALGORITHMS: dict[Collective, dict[str, Callable[[Team], Program]]] = {
    Collective.ALL_REDUCE: {
        "direct_one_shot": lambda team: direct.all_reduce_one_shot(team.ranks),
        "direct_two_shot": lambda team: direct.all_reduce_two_shot(team.ranks),
        "ring": lambda team: ring.all_reduce(team.ranks),
        "binomial_tree": lambda team: binomial.all_reduce(team.ranks, team.per_node),
        "binary_tree": lambda team: binary_tree.all_reduce(team.ranks, team.per_node),
        "double_tree": lambda team: double_tree.all_reduce(team.ranks, team.per_node),
        "two_tree": lambda team: double_tree.sanders_all_reduce(team.ranks),
        "halving_doubling": lambda team: halving_doubling.all_reduce(team.ranks),
        "node_ring": lambda team: hierarchical.node_ring(team.ranks, team.per_node),
        "two_level": lambda team: hierarchical.two_level(team.ranks, team.per_node),
    },
    Collective.REDUCE: {
        "direct": lambda team: direct.reduce(team.ranks, team.root),
        "binomial_tree": lambda team: binomial.reduce(team.ranks, team.root),
        "binary_tree": lambda team: binary_tree.reduce(team.ranks, team.root),
        "two_tree": lambda team: double_tree.sanders_reduce(team.ranks, team.root),
    },
    Collective.BROADCAST: {
        "direct": lambda team: direct.broadcast(team.ranks, team.root),
        "binomial_tree": lambda team: binomial.broadcast(team.ranks, team.root),
        "binary_tree": lambda team: binary_tree.broadcast(team.ranks, team.root),
        "two_tree": lambda team: double_tree.sanders_broadcast(team.ranks, team.root),
    },
    Collective.ALL_GATHER: {
        "direct": lambda team: direct.all_gather(team.ranks),
        "ring": lambda team: ring.all_gather(team.ranks),
        "bruck": lambda team: bruck.all_gather(team.ranks),
        "halving_doubling": lambda team: halving_doubling.all_gather(team.ranks),
    },
    Collective.GATHER: {
        "direct": lambda team: direct.gather(team.ranks, team.root),
        "binomial_tree": lambda team: binomial.gather(team.ranks, team.root),
    },
    Collective.SCATTER: {
        "direct": lambda team: direct.scatter(team.ranks, team.root),
        "binomial_tree": lambda team: binomial.scatter(team.ranks, team.root),
    },
    Collective.REDUCE_SCATTER: {
        "direct": lambda team: direct.reduce_scatter(team.ranks),
        "ring": lambda team: ring.reduce_scatter(team.ranks),
        "halving_doubling": lambda team: halving_doubling.reduce_scatter(team.ranks),
    },
    Collective.ALL_TO_ALL: {
        "direct": lambda team: direct.all_to_all(team.ranks),
        "bruck": lambda team: bruck.all_to_all(team.ranks),
    },
    Collective.BARRIER: {
        "direct": lambda team: direct.barrier(team.ranks),
        "bruck": lambda team: bruck.barrier(team.ranks),
    },
    Collective.SEND: {"direct": lambda _: direct.send()},
}

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


def build(
    collective: Collective, algorithm: str, *, ranks: int, root: int = 0, per_node: int = 1
) -> Program:
    """Build the program of a named algorithm, for nodes of `per_node` ranks.

    Raises:
        ProgramError: the algorithm does not take so many ranks on so many nodes.
    """
    return ALGORITHMS[collective][algorithm](Team(ranks, root, per_node))
