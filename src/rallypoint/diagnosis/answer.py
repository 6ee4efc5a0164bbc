"""Why is a job stuck, slow or dead? Two looks at it go in, an answer comes out.

    facts --sight.py--> ranks --waits.py--> waits --graph.py--> roots, knots
          --findings.py, causes.py--> what is wrong --answer_text.py--> explanation

Causes are given only for roots, never for ranks that wait (docs/decisions/080-explain.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.recorded_call import RecordedGroup
from rallypoint.diagnosis import answer_text
from rallypoint.diagnosis.activity import Doing
from rallypoint.diagnosis.answer_text import evidence
from rallypoint.diagnosis.explanation import Cause, Edge, Explanation, Root, Strength, Verdict
from rallypoint.diagnosis.facts import Facts
from rallypoint.diagnosis.findings import HangFinding, find
from rallypoint.diagnosis.graph import Clause, Node, reduce_graph
from rallypoint.diagnosis.history import Pace, pace
from rallypoint.diagnosis.phrases import does, numbered, seconds, some_ranks
from rallypoint.diagnosis.sight import Condition, Rank, Sight, look, members_of
from rallypoint.diagnosis.waits import Wait, find_waits

_MOST_ACTIVITIES = 2


def parts(sight: Sight, waits: Sequence[Wait]) -> list[str]:
    """``no hang: all ranks left all_reduce #9001 200 ms ago``, ``the step takes 2.1 s ...``."""
    if all(rank.condition is Condition.ENDED for rank in sight):
        return ["no hang: all ranks have ended (code 0)"]
    groups = _largest(sight)
    found = pace(groups)
    slow = _pace(found, sight) if found else ""
    told = [_state(sight, groups), _waiting(waits, sight), slow]
    if told[0] and slow and told[1].startswith("no rank"):
        told[1] = ""
    if told[1].startswith("no rank"):
        told += _doing(sight)
    first, *rest = filter(None, told)
    return [f"no hang: {first}", *rest]


def _state(sight: Sight, groups: dict[int, RecordedGroup]) -> str:
    """Where all ranks are."""
    last = {rank: group.calls[-1] for rank, group in groups.items() if group.calls}
    if not last or len(last) < len(groups):
        return "calls go on" if sight.moved else ""
    calls = list(last.values())
    if {call.number for call in calls} != {calls[0].number} or calls[0].state != "done":
        return "calls go on" if sight.moved else ""
    if any(call.state != "done" for call in calls):
        return "calls go on" if sight.moved else ""
    all_ranks = "all ranks" if len(groups) == len(sight.ranks) else some_ranks(groups)
    ago = [
        since_s
        for rank, call in last.items()
        if (since_s := sight.ranks[rank].since_s(call.ended_ns)) is not None
    ]
    when = f" {seconds(min(ago))} ago" if ago else ""
    return f"{all_ranks} left {numbered(calls[0])}{when}"


def _doing(sight: Sight) -> list[str]:
    """What the ranks do that wait for nobody."""
    folded: dict[str, list[int]] = {}
    for rank in sight:
        if rank.condition is Condition.RUNS and rank.activity.site:
            folded.setdefault(str(rank.activity), []).append(rank.rank)
    most = sorted(folded.items(), key=lambda each: -len(each[1]))[:_MOST_ACTIVITIES]
    return [f"{some_ranks(ranks)} {does(words, len(ranks))}" for words, ranks in most]


def _waiting(waits: Sequence[Wait], sight: Sight) -> str:
    """Who waits for whom at present, which has not been long."""
    waiting = [wait for wait in waits if wait.clauses]
    if not waiting:
        forming = [rank.rank for rank in sight if rank.activity.doing is Doing.INIT]
        if forming and len(forming) == len(sight.ranks):
            return "all ranks are in init_process_group"
        return "no rank waits for another"
    ranks = sorted({wait.rank for wait in waiting})
    targets = sorted(
        {
            target
            for wait in waiting
            for clause in wait.clauses
            for target in clause
            if isinstance(target, int)
        }
        - set(ranks)
    )
    known = [wait.for_s for wait in waiting if wait.for_s is not None]
    for_s = f" for {seconds(max(known))}" if known else ""
    verb = "has waited" if len(ranks) == 1 else "have waited"
    if not for_s:
        verb = "waits" if len(ranks) == 1 else "wait"
    whom = f" for {some_ranks(targets)}" if targets else ""
    what = f", which {_does(sight.ranks[targets[0]])}" if len(targets) == 1 else ""
    return f"{some_ranks(ranks)} {verb}{for_s} in {waiting[0].words}{whom}{what}"


def _does(rank: Rank) -> str:
    return str(rank.activity)


def _pace(found: Pace, sight: Sight) -> str:
    step = ""
    if found.step_s is not None:
        step = f"the step takes {seconds(found.step_s)} (median of {found.steps})"
    if found.last is None:
        return step if found.step_s and found.step_s >= 1.0 else ""
    rank = sight.ranks[found.last]
    late = (
        f"rank {found.last} is slow: it comes last in {found.times} of {found.calls}, "
        f"{seconds(found.late_s)} after the others"
    )
    process = rank.worker.process if rank.worker else None
    if process and process.starved >= 0.3:
        late += f" (it gets no core for {process.starved * 100:.0f} % of the time)"
    elif rank.activity.site and not rank.activity.doing.communicates:
        late += f" (it {rank.activity})"
    return f"{step}, {late}" if step else late


def _largest(sight: Sight) -> dict[int, RecordedGroup]:
    """For each rank, the group with the most ranks; of equal ones, the one with the most calls."""
    by_key: dict[str, dict[int, RecordedGroup]] = {}
    for rank in sight:
        for key, group in rank.groups.items():
            if not group.has_left and (len(members_of(group)) != 1):
                by_key.setdefault(key, {})[rank.rank] = group
    return max(
        by_key.values(),
        key=lambda groups: (len(groups), max(len(group.calls) for group in groups.values())),
        default={},
    )


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
            sentence=answer_text.cut(f"on node {place.node_rank} ({place.host}), {trouble}"),
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
            sentence=answer_text.joined(parts(sight, waits)),
            evidence=evidence(sight, waits, ()),
            edges=edges,
        )
    told = findings[0]
    kind = Verdict.UNEXPLAINED if told.strength is Strength.UNKNOWN else Verdict.EXPLAINED
    return Explanation(
        kind=kind,
        sentence=answer_text.sentence(told),
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
        text=answer_text.main_clause(finding),
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
