"""The evidence for an answer: one line per fact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rallypoint.diagnosis.activity import is_users, main_stack
from rallypoint.diagnosis.explanation import MOST_EVIDENCE, Strength
from rallypoint.diagnosis.findings import HangFinding
from rallypoint.diagnosis.phrases import details, listed, numbered, seconds, some_ranks, times
from rallypoint.diagnosis.sentence import main_clause
from rallypoint.diagnosis.sight import Rank, Sight
from rallypoint.diagnosis.waits import Wait

_MOST_ROOTS = 3
_MOST_FRAMES = 4
_MOST_CALLS = 4


def evidence(
    sight: Sight, waits: Sequence[Wait], findings: Sequence[HangFinding]
) -> tuple[str, ...]:
    """At most twelve lines, the most important first."""
    first = findings[0] if findings else None
    lines = [
        *(line for each in (first.ranks if first else ())[:_MOST_ROOTS]
          for line in _of_rank(sight.ranks[each])),
        *who_is_in_what(waits),
        *(f"also: {main_clause(each)}" for each in findings[1 : 1 + _MOST_ROOTS]),
        *_of_nodes(sight),
        *_of_method(sight, first),
    ]  # fmt: skip
    if len(lines) > MOST_EVIDENCE:
        more = len(lines) - MOST_EVIDENCE + 1
        lines = [*lines[: MOST_EVIDENCE - 1], f"and {more} more"]
    return tuple(lines)


def _of_rank(rank: Rank) -> Iterator[str]:
    worker = rank.worker
    if worker is None:
        return
    process = worker.process
    if process is not None:
        host = f", host {rank.node.host}" if rank.node else ""
        waits = [
            f"{thread.syscall or thread.wait}{f' of {thread.path}' if thread.path else ''}"
            for thread in process.threads
            if thread.id == process.pid and (thread.syscall or thread.wait)
        ]
        yield (
            f"rank {rank.rank} (pid {process.pid}{host}): state {process.state}, "
            f"{process.cpu * 100:.0f} % CPU{f', in {waits[0]}' if waits else ''}"
        )
    main = main_stack(worker.stacks)
    if main and main.frames:
        own = [frame for frame in main.frames if is_users(frame)] or main.frames
        frames = [f"{each.function} ({each.file}:{each.line})" for each in own]
        yield f"rank {rank.rank} is in {' < '.join(frames[:_MOST_FRAMES])}"
    for group in rank.groups.values():
        for call in group.calls[-1:]:
            ago = rank.since_s(call.ended_ns or call.since_ns)
            when = "" if ago is None else f", {seconds(ago)} ago"
            if when and call.state == "running":
                when = f", for {seconds(ago or 0.0)}"
            elif when and not call.ended_ns:
                when = f", begun {seconds(ago or 0.0)} ago"
            verb = {"done": "has done", "failed": "failed in"}.get(call.state, "is in")
            yield f"rank {rank.rank} {verb} {numbered(call)} of {group.name}{when}"
            return


def who_is_in_what(waits: Sequence[Wait]) -> Iterator[str]:
    """The lines that say who is in which call, with equal ones merged."""
    folded: dict[object, list[Wait]] = {}
    for wait in waits:
        folded.setdefault((wait.group.key if wait.group else "", wait.words, wait.site), []).append(
            wait
        )
    for alike in list(folded.values())[:_MOST_CALLS]:
        one = alike[0]
        ranks = some_ranks(wait.rank for wait in alike)
        known = [wait.for_s for wait in alike if wait.for_s is not None]
        what = one.words
        if one.call and one.group:
            more = details(one.call, one.group)
            what += f" of {one.group.name}{f' ({more})' if more else ''}"
        probably = "probably " if one.strength is Strength.INFERRED else ""
        for_s = f", for {seconds(max(known))}" if known else ""
        yield f"{ranks} {probably}in {what}{f', at {one.site}' if one.site else ''}{for_s}"


def _of_nodes(sight: Sight) -> Iterator[str]:
    for node in sight.second.nodes:
        name = f"node {node.node_rank} ({node.host})"
        if node.silent_s is not None:
            yield f"{name} has not answered for {seconds(node.silent_s)}"
        if node.oom_kills:
            yield f"{name}: the kernel's out-of-memory killer struck {times(node.oom_kills)}"


def _of_method(sight: Sight, first: HangFinding | None) -> Iterator[str]:
    """What limits the certainty of the answer."""
    blind = [rank.rank for rank in sight if rank.worker is not None and not rank.has_record]
    if blind:
        yield f"{some_ranks(blind)}: operation numbers unknown, because no calls are recorded"
    unanswered = {
        rank.rank: rank.worker.no_stacks_because
        for rank in sight
        if rank.worker and not rank.worker.stacks and rank.worker.no_stacks_because
    }
    without, reasons = sorted(unanswered), sorted(set(unanswered.values()))
    if reasons:
        yield f"no Python stacks of {some_ranks(without)}: {listed(reasons, 2)}"
    if first and first.strength is Strength.INFERRED:
        yield '"probably": inferred from stacks or from what PyTorch records, not seen in the calls'
