"""Draws a program in characters: the path of a chunk as a tree, and who sends what in each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.lab.simulate import SimulationRequest
from rallypoint.lab.simulate.rows import collective_of, program_of
from rallypoint.schedule.catalogue import ALGORITHMS, Team
from rallypoint.schedule.custom import load
from rallypoint.schedule.execution import Trace, execute
from rallypoint.schedule.program import SLOTS, Collective, Program, Send, describe
from rallypoint.schedule.proof.verify import verify

# The collectives in which a chunk has the same index on every rank.
_WITH_PATHS = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST)
MOST_RANKS = 16
FIRST_STEPS = 4


def explain(request: SimulationRequest) -> None:
    """Print drawings of every requested algorithm."""
    ranks, collective = request.ranks[0], collective_of(request.collective)
    if ranks > MOST_RANKS:
        raise InvalidArgumentError(
            f"{ranks} ranks are too many to draw; at most {MOST_RANKS} can be drawn"
        )
    team = Team(ranks, 0, min(request.per_node or 1, ranks))
    for name in request.algorithms or list(ALGORITHMS[collective]):
        algorithm = load(name) if ".py" in name else name
        print("\n".join(drawing(program_of(collective, algorithm, team))), end="\n\n")


def drawing(program: Program) -> Iterator[str]:
    """The lines that explain a program."""
    trace = execute(program, slots=64, pieces=1)
    report = verify(program, slots=SLOTS)
    steps = _steps(trace)
    count, chunks = len(steps), program.chunks
    yield (
        f"{program.collective.operation}, {program.name}, {program.ranks} ranks: "
        f"{count} step{'s' * (count != 1)}, {chunks} chunk{'s' * (chunks != 1)} a block"
    )
    facts = [
        "reduces in rank order" if program.collective.reduces and report.in_rank_order else "",
        "can be restarted in place" if report.restartable else "",
        f"needs {report.scratch_chunks} chunks of scratch" if report.scratch_chunks else "",
    ]
    if any(facts):
        yield "  " + "; ".join(fact for fact in facts if fact)
    for chunk in range(min(chunks, 2)) if program.collective in _WITH_PATHS else ():
        yield ""
        word = "to the rank that gets the result" if program.collective.reduces else "from its rank"
        yield f"  the path of chunk {chunk}, {word}:"
        yield from (f"    {line}" for line in _path(program, trace, chunk))
    yield ""
    for number, lines in list(enumerate(steps, start=1))[:FIRST_STEPS]:
        yield f"  step {number}"
        yield from (f"    {line}" for line in lines)
    if len(steps) > FIRST_STEPS:
        yield f"  ... and {len(steps) - FIRST_STEPS} more"


def _steps(trace: Trace) -> list[list[str]]:
    """Who sends what to whom, ordered by the length of the chain of messages before it."""
    depth = [0] * len(trace.events)
    last: dict[int, int] = {}
    steps: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for number, event in enumerate(trace.events):
        before = depth[last[event.lane]] if event.lane in last else 0
        depth[number] = max([before, *(depth[sending] + 1 for sending in event.takes)])
        last[event.lane] = number
        if isinstance(event.operation, Send):
            rank = trace.lanes[event.lane][0]
            steps[depth[number]].append((rank, f"rank {rank:>2}  {describe(event.operation)}"))
    return [[line for _, line in sorted(steps[depth])] for depth in sorted(steps)]


def _path(program: Program, trace: Trace, chunk: int) -> Iterator[str]:
    """The tree along which a chunk is reduced, or otherwise distributed."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    parents: dict[int, int] = {}
    for event in trace.events:
        operation, rank = event.operation, trace.lanes[event.lane][0]
        if isinstance(operation, Send) or not event.takes:
            continue
        is_reduced = len(operation.operands) > 1
        if is_reduced != program.collective.reduces or not _concerns(event.takes, trace, chunk):
            continue
        for sending in event.takes:
            sender = trace.lanes[trace.events[sending].lane][0]
            one, other = (sender, rank) if is_reduced else (rank, sender)
            if one not in parents and one != other:
                parents[one] = other
                children[other].append(one)
    roots = [rank for rank in range(program.ranks) if rank in children and rank not in parents]
    for root in roots[:1]:
        yield str(root)
        yield from _branches(root, children, "")
    if not roots:
        yield "(it goes round)" if parents else "(it stays where it is)"


def _concerns(takes: tuple[int, ...], trace: Trace, chunk: int) -> bool:
    """Whether any of these messages contains the chunk."""
    operation = trace.events[takes[0]].operation
    assert isinstance(operation, Send)
    source = operation.source
    return source.index <= chunk < source.index + source.count


def _branches(rank: int, children: dict[int, list[int]], indent: str) -> Iterator[str]:
    below = sorted(children.get(rank, []))
    for child in below:
        is_last = child == below[-1]
        yield f"{indent}+-- {child}"
        yield from _branches(child, children, indent + ("    " if is_last else "|   "))
