"""The answer for a job that does not hang: what it does, and which rank slows it down."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.recorded_call import RecordedGroup
from rallypoint.diagnosis.activity import Doing
from rallypoint.diagnosis.history import Pace, pace
from rallypoint.diagnosis.phrases import does, numbered, seconds, some_ranks
from rallypoint.diagnosis.sight import Condition, Rank, Sight, members_of
from rallypoint.diagnosis.waits import Wait

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
