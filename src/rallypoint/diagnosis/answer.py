"""Why is a job stuck, slow or dead? Two looks at it go in, an answer comes out.

    facts --sight.py--> ranks --waits.py--> waits --graph.py--> roots, knots
          --findings.py, causes.py--> what is wrong --sentence.py, evidence.py--> explanation

Causes are given only for roots, never for ranks that wait (docs/decisions/080-explain.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.diagnosis import no_hang, sentence
from rallypoint.diagnosis.activity import Doing
from rallypoint.diagnosis.evidence import evidence
from rallypoint.diagnosis.explanation import Cause, Edge, Explanation, Root, Strength, Verdict
from rallypoint.diagnosis.facts import Facts
from rallypoint.diagnosis.findings import HangFinding, find
from rallypoint.diagnosis.graph import Clause, Node, reduce_graph
from rallypoint.diagnosis.sight import Condition, Rank, Sight, look
from rallypoint.diagnosis.waits import Wait, find_waits


def explanation_of(first: Facts, second: Facts) -> Explanation:
    """The answer.

    Args:
        first, second: taken about half a second apart. The same one twice if there was only one
            look, or the job is over: then only times show what lasts.
    """
    sight = look(first, second)
    waits = find_waits(sight)
    needs = needs_of(waits)
    reduction = reduce_graph(needs)
    findings = find(sight, waits, needs, reduction)
    edges = tuple(_edges(waits))
    cut_off = next(filter(_is_cut_off, sight), None)
    if cut_off is not None and cut_off.node is not None:
        place, trouble = cut_off.node, cut_off.node.loopback_trouble
        return Explanation(
            kind=Verdict.EXPLAINED,
            sentence=sentence.cut(f"on node {place.node_rank} ({place.host}), {trouble}"),
            evidence=evidence(sight, waits, findings),
        )
    if not findings:
        if all(rank.condition is Condition.NOT_SEEN for rank in sight):
            return _unknown("nothing was kept of the job")
        silent = [rank for rank in sight if rank.condition is Condition.SILENT]
        if silent and not sight.moved:
            node = silent[0].node
            assert node is not None
            return _unknown(f"node {node.node_rank} ({node.host}) has not answered")
        if all(_is_blind_to(rank) for rank in sight):
            return Explanation(
                kind=Verdict.UNEXPLAINED,
                sentence="cannot tell whether the job hangs, because its workers tell neither "
                "their calls nor where they are: rallypoint is not installed for them, or they "
                "are no Python programs (or were started with python -S).",
                evidence=evidence(sight, waits, ()),
            )
        return Explanation(
            kind=Verdict.NO_HANG,
            sentence=sentence.joined(no_hang.parts(sight, waits)),
            evidence=evidence(sight, waits, ()),
            edges=edges,
        )
    told = findings[0]
    kind = Verdict.UNEXPLAINED if told.strength is Strength.UNKNOWN else Verdict.EXPLAINED
    return Explanation(
        kind=kind,
        sentence=sentence.sentence(told),
        evidence=evidence(sight, waits, findings),
        roots=tuple(_root(each, sight) for each in findings),
        edges=edges,
        knot=next((each.ranks for each in findings if each.cause is Cause.DEADLOCK), ()),
    )


def needs_of(waits: Sequence[Wait]) -> dict[Node, tuple[Clause, ...]]:
    """The graph; a rank waits for all of its waits."""
    needs: dict[Node, tuple[Clause, ...]] = {}
    for wait in waits:
        if wait.clauses:
            needs[wait.rank] = (*needs.get(wait.rank, ()), *wait.clauses)
    return needs


def _is_cut_off(rank: Rank) -> bool:
    """Whether it waits for others at the start, and cannot reach those of its own machine."""
    has_trouble = rank.node is not None and bool(rank.node.loopback_trouble)
    return has_trouble and rank.activity.doing is Doing.INIT


def _is_blind_to(rank: Rank) -> bool:
    """Whether it is alive, and nothing but its process is known."""
    worker = rank.worker
    lives = worker is not None and worker.end is None and rank.condition is Condition.RUNS
    return lives and worker is not None and not worker.groups and not worker.stacks


def _unknown(because: str) -> Explanation:
    return Explanation(
        kind=Verdict.UNEXPLAINED,
        sentence=f"cannot tell why the job stands still, because {because}.",
    )


def _root(finding: HangFinding, sight: Sight) -> Root:
    return Root(
        ranks=finding.ranks,
        cause=finding.cause,
        text=sentence.main_clause(finding),
        strength=finding.strength,
        waited_for_by=finding.waiters,
        pids=tuple(pid for rank in finding.ranks if (pid := sight.ranks[rank].pid)),
    )


def _edges(waits: Sequence[Wait]) -> list[Edge]:
    """The edges; ranks that wait in the same way share one."""
    folded: dict[object, list[Wait]] = {}
    for wait in waits:
        number = wait.call.number if wait.call and wait.call.peer is None else -1
        key = (wait.clauses, wait.group and wait.group.key, wait.words, number, wait.site)
        folded.setdefault(key, []).append(wait)
    return [edge for alike in folded.values() for edge in _edges_of(alike)]


def _edges_of(alike: Sequence[Wait]) -> list[Edge]:
    wait = alike[0]
    ranks = [
        sorted(target for target in clause if isinstance(target, int)) for clause in wait.clauses
    ]
    alone = tuple(sorted(each[0] for each in ranks if len(each) == 1))
    choices = [(tuple(each), True) for each in ranks if len(each) > 1]
    number = None
    if wait.call:
        number = wait.call.number if wait.call.peer is None else wait.call.root
    known = [each.for_s for each in alike if each.for_s is not None]
    return [
        Edge(
            ranks=tuple(each.rank for each in alike),
            waits_for=targets,
            any_of=any_of,
            group=wait.group.name if wait.group else "",
            operation=wait.operation,
            number=number,
            site=wait.site,
            for_s=max(known, default=None),
            strength=wait.strength,
        )
        for targets, any_of in [*([(alone, False)] if alone else []), *choices]
    ]
