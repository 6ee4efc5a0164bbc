"""An answer in words: its sentence, and the evidence for it.

The sentence: WHO DOES WHAT WHERE; WHO WAITS, WHERE, FOR HOW LONG; WHAT TO DO.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rallypoint.diagnosis.activity import is_users, main_stack
from rallypoint.diagnosis.explanation import MOST_CHARACTERS, MOST_EVIDENCE, Strength
from rallypoint.diagnosis.findings import HangFinding
from rallypoint.diagnosis.leads import call_key, longest
from rallypoint.diagnosis.phrases import (
    details,
    does,
    listed,
    numbered,
    seconds,
    shortened,
    some_ranks,
    times,
)
from rallypoint.diagnosis.sight import Rank, Sight
from rallypoint.diagnosis.waits import Wait

_MOST_SITES = 2


def sentence(finding: HangFinding) -> str:
    """The problem in one line; the least important part is left out if it gets too long."""
    lead = main_clause(finding)
    waiting = _waiting(finding)
    rest = _rest(finding)
    remedy = finding.lead.remedy
    own = finding.lead.extra
    if len(finding.ranks) > 1:
        own = own.replace("; its ", "; their ")
    for extra, others in ((True, True), (False, True), (False, False)):
        parts = [
            lead + (own if extra else ""),
            waiting,
            rest if others else "",
            remedy,
        ]
        text = "; ".join(filter(None, parts)) + "."
        if len(text) <= MOST_CHARACTERS:
            return text
    return cut(lead, "; ".join(filter(None, [waiting, remedy])))


def cut(lead: str, waiting: str = "") -> str:
    """Shortened at the end of the main clause, so that the waiting ranks are still named."""
    end = f"; {waiting}." if waiting else "."
    room = MOST_CHARACTERS - len(end) - len(" ...")
    if room < MOST_CHARACTERS // 3:
        return cut(lead)
    if len(lead) + len(end) <= MOST_CHARACTERS:
        return lead + end
    return f"{shortened(lead, room)}{end}"


def joined(parts: Sequence[str]) -> str:
    """The parts of a sentence; the last ones are left out if it would get too long."""
    parts = [part for part in parts if part]
    while len(parts) > 1 and len("; ".join(parts)) + 1 > MOST_CHARACTERS:
        parts = parts[:-1]
    return cut("; ".join(parts))


def main_clause(finding: HangFinding) -> str:
    """Who does what, where."""
    count = len(finding.ranks)
    pronoun = "it" if count == 1 else "they"
    parts = re.split(r"\{(who|it)\} ?", finding.lead.text)
    text = parts[0]
    for who, words in zip(parts[1::2], parts[2::2], strict=True):
        text += some_ranks(finding.ranks) if who == "who" else pronoun
        text += f" {does(words, count)}" if words else ""
    return text


def _waiting(finding: HangFinding) -> str:
    """Who waits for it directly, in the call in which most do."""
    if not finding.waits:
        others = sorted(set(finding.waiters) - {*finding.ranks, *finding.told})
        return f"{some_ranks(others)} {_wait(others)} for them" if others else ""
    chosen = longest(finding.waits)
    alike = [wait for wait in finding.waits if call_key(wait) == call_key(chosen)]
    ranks = sorted({wait.rank for wait in alike})
    probably = "probably " if chosen.strength is Strength.INFERRED else ""
    text = f"{some_ranks(ranks)} {probably}{_wait(ranks)}"
    if chosen.within:
        place = ", ".join(filter(None, [chosen.within, _sites(alike)]))
        return f"{text} in {chosen.words} ({place}){_time(chosen)}"
    if finding.lead.pronoun or finding.lead.tells_call:
        if finding.lead.pronoun:
            text += " for it" if len(finding.ranks) == 1 else " for them"
        elif not finding.ranks or finding.ranks == tuple(ranks):
            text = f"{text} in it"
    if not finding.lead.tells_call:
        name = chosen.words
        if chosen.call and chosen.group and chosen.call.peer is None:
            name += f" of {chosen.group.name}" if _is_unusual(chosen) else ""
        text += f" in {name}"
    sites = _sites(alike)
    return f"{text}{f' at {sites}' if sites else ''}{_time(chosen)}"


def _is_unusual(wait: Wait) -> bool:
    return wait.group is not None and wait.group.name not in ("default group", "default_pg")


def _rest(finding: HangFinding) -> str:
    """Who waits for those ranks."""
    if not finding.waits:
        return ""
    others = sorted(set(finding.waiters) - {wait.rank for wait in finding.waits})
    chosen = longest(finding.waits)
    also = sorted(
        {wait.rank for wait in finding.waits if call_key(wait) != call_key(chosen)}
        - {wait.rank for wait in finding.waits if call_key(wait) == call_key(chosen)}
    )
    parts = [f"{some_ranks(also)} in other calls"] if also else []
    if others:
        parts.append(f"{some_ranks(others)} {_wait(others)} for those")
    return "; ".join(parts)


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _sites(waits: Sequence[Wait]) -> str:
    return listed(sorted({wait.site for wait in waits if wait.site}), _MOST_SITES)


def _time(wait: Wait) -> str:
    return f" ({seconds(wait.for_s)})" if wait.for_s is not None else ""


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
