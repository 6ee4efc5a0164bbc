"""The first line of an answer: WHO DOES WHAT WHERE; WHO WAITS, WHERE, FOR HOW LONG; WHAT TO DO."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rallypoint.diagnosis.explanation import MOST_CHARACTERS, Strength
from rallypoint.diagnosis.findings import HangFinding
from rallypoint.diagnosis.leads import call_key, longest
from rallypoint.diagnosis.phrases import does, listed, seconds, shortened, some_ranks
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
