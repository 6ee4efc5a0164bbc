"""A graph of which rank waits for which, and which ranks must move so that all can.

A node waits for all of its clauses, and in each for one target: a collective has a clause for each
missing member, a receive from any rank one clause with all others. A node that waits for nothing
can move, and then the nodes that wait for it can (the AND-OR graphs of Hilbrich et al.,
"Distributed wait state tracking for runtime MPI deadlock detection", SC'13).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# A rank, or something else that can be waited for: ("mismatch", key, number), ("host", address).
Node = int | tuple[str, ...]
Clause = frozenset[Node]
Needs = Mapping[Node, tuple[Clause, ...]]


@dataclass(frozen=True, slots=True)
class ReducedGraph:
    """The result of reducing a graph.

    Attributes:
        roots: nodes that wait for nothing but are waited for.
        stuck: nodes that could not move even if all roots did.
    """

    roots: tuple[Node, ...]
    stuck: frozenset[Node]


def reduce_graph(needs: Needs) -> ReducedGraph:
    """Remove every node that can move, until none can."""
    needs = {node: _least(clauses) for node, clauses in needs.items()}
    unmet = {node: set(clauses) for node, clauses in needs.items()}
    of_target: dict[Node, list[tuple[Node, Clause]]] = {}
    for node, clauses in needs.items():
        for clause in clauses:
            for target in clause:
                of_target.setdefault(target, []).append((node, clause))
    free = [node for node in dict.fromkeys([*needs, *of_target]) if not unmet.get(node)]
    ready = deque(free)
    moves = set(free)
    while ready:
        for waiter, clause in of_target.get(ready.popleft(), ()):
            unmet[waiter].discard(clause)
            if not unmet[waiter] and waiter not in moves:
                moves.add(waiter)
                ready.append(waiter)
    roots = tuple(node for node in free if node in of_target)
    return ReducedGraph(roots, frozenset(needs) - moves)


def waiting_for(waiters: Mapping[Node, set[Node]], targets: Iterable[Node]) -> frozenset[Node]:
    """Who waits for one of these, directly or indirectly, without these themselves.

    `waiters` has for each node who waits for it directly.
    """
    given = frozenset(targets)
    found = set(given)
    ahead = list(given)
    while ahead:
        new = waiters.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return frozenset(found - given)


def smallest_cycle(needs: Needs, stuck: frozenset[Node]) -> tuple[Node, ...]:
    """The shortest cycle among the stuck nodes, from its smallest rank on, in waiting order."""
    next_nodes = {
        node: sorted(
            {target for clause in needs[node] if clause <= stuck for target in clause}, key=_order
        )
        for node in stuck
    }
    best: tuple[Node, ...] = ()
    for start in sorted(stuck, key=_order):
        best = _cycle_from(start, next_nodes, shorter_than=len(best)) or best
        if len(best) == 2:
            break
    return best


def _cycle_from(
    start: Node, next_nodes: Mapping[Node, list[Node]], shorter_than: int
) -> tuple[Node, ...]:
    """The shortest path from `start` back to it; empty if it is no shorter than the known one."""
    came_from: dict[Node, Node] = {}
    ahead = deque([start])
    while ahead:
        node = ahead.popleft()
        for target in next_nodes[node]:
            if target == start:
                path = [node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return () if shorter_than and len(path) >= shorter_than else tuple(path[::-1])
            if target not in came_from:
                came_from[target] = node
                ahead.append(target)
    return ()


def _least(clauses: tuple[Clause, ...]) -> tuple[Clause, ...]:
    """The clauses without those that follow from others."""
    distinct = list(dict.fromkeys(clauses))
    return tuple(
        one for one in distinct if len(one) == 1 or not any(other < one for other in distinct)
    )


def _order(node: Node) -> tuple[int, str]:
    return (node, "") if isinstance(node, int) else (1 << 62, str(node))
