"""The list of all built-in algorithms, and of those used for many ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.schedule import algorithms
from rallypoint.schedule.program import Collective, Program


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that a program is for: their number, the root, and how many are on each node."""

    ranks: int
    root: int = 0
    per_node: int = 1


ALGORITHMS: dict[Collective, dict[str, Callable[[Team], Program]]] = {
    Collective.ALL_REDUCE: {
        "direct_one_shot": lambda team: algorithms.direct.all_reduce_one_shot(team.ranks),
        "direct_two_shot": lambda team: algorithms.direct.all_reduce_two_shot(team.ranks),
        "direct_two_phase": lambda team: algorithms.direct.all_reduce_two_phase(team.ranks),
        "ring": lambda team: algorithms.ring.all_reduce(team.ranks),
        "binomial_tree": lambda team: algorithms.binomial.all_reduce(team.ranks, team.per_node),
        "binary_tree": lambda team: algorithms.binary_tree.all_reduce(team.ranks, team.per_node),
        "double_tree": lambda team: algorithms.binary_tree.double_all_reduce(
            team.ranks, team.per_node
        ),
        "two_tree": lambda team: algorithms.binary_tree.two_all_reduce(team.ranks),
        "recursive_doubling": lambda team: algorithms.halving_doubling.recursive_doubling(
            team.ranks
        ),
        "halving_doubling": lambda team: algorithms.halving_doubling.all_reduce(team.ranks),
        "node_ring": lambda team: algorithms.two_level.node_ring(team.ranks, team.per_node),
        "two_level": lambda team: algorithms.two_level.all_reduce(team.ranks, team.per_node),
    },
    Collective.REDUCE: {
        "direct": lambda team: algorithms.direct.reduce(team.ranks, team.root),
        "binomial_tree": lambda team: algorithms.binomial.reduce(team.ranks, team.root),
        "binary_tree": lambda team: algorithms.binary_tree.reduce(team.ranks, team.root),
        "two_tree": lambda team: algorithms.binary_tree.two_reduce(team.ranks, team.root),
        "two_level": lambda team: algorithms.two_level.reduce(team.ranks, team.root, team.per_node),
    },
    Collective.BROADCAST: {
        "direct": lambda team: algorithms.direct.broadcast(team.ranks, team.root),
        "binomial_tree": lambda team: algorithms.binomial.broadcast(team.ranks, team.root),
        "binary_tree": lambda team: algorithms.binary_tree.broadcast(team.ranks, team.root),
        "two_tree": lambda team: algorithms.binary_tree.two_broadcast(team.ranks, team.root),
        "two_level": lambda team: algorithms.two_level.broadcast(
            team.ranks, team.root, team.per_node
        ),
    },
    Collective.ALL_GATHER: {
        "direct": lambda team: algorithms.direct.all_gather(team.ranks),
        "ring": lambda team: algorithms.ring.all_gather(team.ranks),
        "bruck": lambda team: algorithms.bruck.all_gather(team.ranks),
        "halving_doubling": lambda team: algorithms.halving_doubling.all_gather(team.ranks),
        "two_level": lambda team: algorithms.two_level.all_gather(team.ranks, team.per_node),
    },
    Collective.GATHER: {
        "direct": lambda team: algorithms.direct.gather(team.ranks, team.root),
        "binomial_tree": lambda team: algorithms.binomial.gather(team.ranks, team.root),
    },
    Collective.SCATTER: {
        "direct": lambda team: algorithms.direct.scatter(team.ranks, team.root),
        "binomial_tree": lambda team: algorithms.binomial.scatter(team.ranks, team.root),
    },
    Collective.REDUCE_SCATTER: {
        "direct": lambda team: algorithms.direct.reduce_scatter(team.ranks),
        "ring": lambda team: algorithms.ring.reduce_scatter(team.ranks),
        "halving_doubling": lambda team: algorithms.halving_doubling.reduce_scatter(team.ranks),
        "two_level": lambda team: algorithms.two_level.reduce_scatter(team.ranks, team.per_node),
    },
    Collective.ALL_TO_ALL: {
        "direct": lambda team: algorithms.direct.all_to_all(team.ranks),
        "bruck": lambda team: algorithms.bruck.all_to_all(team.ranks),
    },
    Collective.BARRIER: {
        "direct": lambda team: algorithms.direct.barrier(team.ranks),
        "bruck": lambda team: algorithms.bruck.barrier(team.ranks),
        "two_level": lambda team: algorithms.two_level.barrier(team.ranks, team.per_node),
    },
    Collective.SCAN: {
        "direct": lambda team: algorithms.prefix_reduction.direct(team.ranks),
        "recursive_doubling": lambda team: algorithms.prefix_reduction.recursive_doubling(
            team.ranks
        ),
        "chain": lambda team: algorithms.prefix_reduction.chain(team.ranks),
    },
    Collective.SEND: {"direct": lambda _: algorithms.direct.send()},
}

# The algorithms for many ranks by default, as (few bytes, many bytes); see choose.py.
MANY_RANKS = {
    Collective.ALL_REDUCE: ("binomial_tree", "ring"),
    Collective.REDUCE: ("binomial_tree", "binary_tree"),
    Collective.BROADCAST: ("binomial_tree", "two_tree"),
    Collective.ALL_GATHER: ("bruck", "ring"),
    Collective.REDUCE_SCATTER: ("halving_doubling", "ring"),
    Collective.GATHER: ("binomial_tree", "direct"),
    Collective.SCATTER: ("binomial_tree", "direct"),
    Collective.ALL_TO_ALL: ("bruck", "direct"),
    Collective.BARRIER: ("bruck", "bruck"),
    Collective.SCAN: ("recursive_doubling", "chain"),
}


def build(
    collective: Collective, algorithm: str, *, ranks: int, root: int = 0, per_node: int = 1
) -> Program:
    """Build the program of a named algorithm, for nodes of `per_node` ranks."""
    return ALGORITHMS[collective][algorithm](Team(ranks, root, per_node))
