"""An answer in words: its sentence, and the evidence for it.

The sentence: WHO DOES WHAT WHERE; WHO WAITS, WHERE, FOR HOW LONG; WHAT TO DO.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rallypoint.diagnosis.activity import is_users, main_stack
from rallypoint.diagnosis.explanation import MOST_CHARACTERS, MOST_EVIDENCE, Strength
from rallypoint.diagnosis.findings import HangFinding
from rallypoint.diagnosis.headline import reported_waits
from rallypoint.diagnosis.job_state import JobState, Rank
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
from rallypoint.diagnosis.waits import Wait

_MOST_SITES = 2
_MOST_ROOTS = 3
_MOST_FRAMES = 4
_MOST_CALLS = 4


def sentence(finding: HangFinding) -> str:
    """The problem in one line; the least important part is left out if it gets too long."""
    clause = main_clause(finding)
    extra = finding.headline.extra
    if len(finding.ranks) > 1:
        extra = extra.replace("; its ", "; their ")
    waiting, others = _waiting(finding), _others(finding)
    remedy = finding.headline.remedy
    for parts in (
        [clause + extra, waiting, others, remedy],
        [clause, waiting, others, remedy],
        [clause, waiting, remedy],
    ):
        text = "; ".join(filter(None, parts)) + "."
        if len(text) <= MOST_CHARACTERS:
            return text
    return cut(clause, "; ".join(filter(None, [waiting, remedy])))


def cut(clause: str, waiting: str = "") -> str:
    """Shortened at the end of the main clause, so that the waiting ranks are still named."""
    end = f"; {waiting}." if waiting else "."
    room = MOST_CHARACTERS - len(end) - len(" ...")
    if room < MOST_CHARACTERS // 3:
        return cut(clause)
    if len(clause) + len(end) <= MOST_CHARACTERS:
        return clause + end
    return f"{shortened(clause, room)}{end}"


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
    parts = re.split(r"\{(who|it)\} ?", finding.headline.text)
    text = parts[0]
    for who, words in zip(parts[1::2], parts[2::2], strict=True):
        text += some_ranks(finding.ranks) if who == "who" else pronoun
        text += f" {does(words, count)}" if words else ""
    return text


def _waiting(finding: HangFinding) -> str:
    """Who waits for it directly, in the call in which most do."""
    headline = finding.headline
    if not finding.waits:
        waiters = sorted(set(finding.waiters) - {*finding.ranks, *finding.named})
        return f"{_who_waits(waiters)} for them" if waiters else ""
    alike = reported_waits(finding.waits)
    first = alike[0]
    ranks = sorted({wait.rank for wait in alike})
    text = _who_waits(ranks, first.strength)
    sites = listed(sorted({wait.site for wait in alike if wait.site}), _MOST_SITES)
    for_s = f" ({seconds(first.for_s)})" if first.for_s is not None else ""
    if first.within:
        return f"{text} in {first.words} ({', '.join(filter(None, [first.within, sites]))}){for_s}"
    if headline.is_about_ranks:
        text += " for it" if len(finding.ranks) == 1 else " for them"
    elif headline.names_call and finding.ranks in ((), tuple(ranks)):
        text += " in it"
    if not headline.names_call:
        is_usual = first.group and first.group.name in ("default group", "default_pg")
        text += f" in {first.words if is_usual or first.is_in_transfer else first.full_name}"
    return f"{text}{f' at {sites}' if sites else ''}{for_s}"


def _others(finding: HangFinding) -> str:
    """Who waits for it in other calls, and who waits for those ranks."""
    direct = {wait.rank for wait in finding.waits}
    if not direct:
        return ""
    other_calls = sorted(direct - {wait.rank for wait in reported_waits(finding.waits)})
    indirect = sorted({*finding.waiters} - direct)
    parts = [f"{some_ranks(other_calls)} in other calls"] if other_calls else []
    if indirect:
        parts.append(f"{_who_waits(indirect)} for those")
    return "; ".join(parts)


def _who_waits(ranks: Sequence[int], strength: Strength = Strength.CERTAIN) -> str:
    return f"{some_ranks(ranks)} {strength.adverb}{does('waits', len(ranks))}"


def for_longest(waits: Iterable[Wait]) -> str:
    """`` for 12.0 s``: the longest of these waits; empty if unknown."""
    known = [wait.for_s for wait in waits if wait.for_s is not None]
    return f" for {seconds(max(known))}" if known else ""


def evidence(
    job: JobState, waits: Sequence[Wait], findings: Sequence[HangFinding]
) -> tuple[str, ...]:
    """At most twelve lines, the most important first."""
    first = findings[0] if findings else None
    lines = [
        *(line for each in (first.ranks if first else ())[:_MOST_ROOTS]
          for line in _of_rank(job.ranks[each])),
        *_who_is_in_what(waits),
        *(f"also: {main_clause(each)}" for each in findings[1 : 1 + _MOST_ROOTS]),
        *_of_nodes(job),
        *_of_method(job, first),
    ]  # fmt: skip
    if len(lines) > MOST_EVIDENCE:
        more = len(lines) - MOST_EVIDENCE + 1
        lines = [*lines[: MOST_EVIDENCE - 1], f"and {more} more"]
    return tuple(lines)


def _of_rank(rank: Rank) -> Iterator[str]:
    if process := rank.process:
        host = f", host {rank.node.host}" if rank.node else ""
        thread = process.main_thread
        call = (thread.syscall or thread.wait) if thread else ""
        path = f" of {thread.path}" if thread and thread.path else ""
        yield (
            f"rank {rank.rank} (pid {process.pid}{host}): state {process.state}, "
            f"{process.cpu * 100:.0f} % CPU{f', in {call}{path}' if call else ''}"
        )
    main = main_stack(rank.stacks)
    if main and main.frames:
        own = [frame for frame in main.frames if is_users(frame)] or main.frames
        frames = [f"{each.function} ({each.file}:{each.line})" for each in own]
        yield f"rank {rank.rank} is in {' < '.join(frames[:_MOST_FRAMES])}"
    for group in [each for each in rank.groups.values() if each.calls][:1]:
        last = group.calls[-1]
        verb = {"done": "has done", "failed": "failed in"}.get(last.state, "is in")
        since_s = rank.since_s(last.ended_ns or last.since_ns)
        when = ""
        if since_s is not None and last.state == "running":
            when = f", for {seconds(since_s)}"
        elif since_s is not None:
            when = f", {'' if last.ended_ns else 'begun '}{seconds(since_s)} ago"
        yield f"rank {rank.rank} {verb} {numbered(last)} of {group.name}{when}"


def _who_is_in_what(waits: Sequence[Wait]) -> Iterator[str]:
    """The lines that say who is in which call, with equal ones merged."""
    folded: dict[object, list[Wait]] = {}
    for wait in waits:
        folded.setdefault((wait.key, wait.site), []).append(wait)
    for alike in list(folded.values())[:_MOST_CALLS]:
        one = alike[0]
        ranks = some_ranks(wait.rank for wait in alike)
        more = details(one.call, one.group) if one.call and one.group else ""
        what = f"{one.full_name}{f' ({more})' if more else ''}"
        site = f", at {one.site}" if one.site else ""
        for_s = for_longest(alike)
        yield f"{ranks} {one.strength.adverb}in {what}{site}{',' if for_s else ''}{for_s}"


def _of_nodes(job: JobState) -> Iterator[str]:
    for node in job.nodes:
        name = f"node {node.node_rank} ({node.host})"
        if node.silent_s is not None:
            yield f"{name} has not answered for {seconds(node.silent_s)}"
        if node.oom_kills:
            yield f"{name}: the kernel's out-of-memory killer struck {times(node.oom_kills)}"


def _of_method(job: JobState, first: HangFinding | None) -> Iterator[str]:
    """What limits the certainty of the answer."""
    blind = [rank.rank for rank in job if rank.worker and not rank.has_record]
    if blind:
        yield f"{some_ranks(blind)}: operation numbers unknown, because no calls are recorded"
    reasons = {
        rank.rank: rank.worker.no_stacks_because
        for rank in job
        if rank.worker and not rank.stacks and rank.worker.no_stacks_because
    }
    if reasons:
        yield f"no Python stacks of {some_ranks(reasons)}: {listed(sorted({*reasons.values()}), 2)}"
    if first and first.strength is Strength.INFERRED:
        yield '"probably": inferred from stacks or from what PyTorch records, not seen in the calls'
