"""The first part of the sentence: which rank does what, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.diagnosis.causes import Obstacle
from rallypoint.diagnosis.explanation import Cause, Strength
from rallypoint.diagnosis.phrases import numbered, seconds
from rallypoint.diagnosis.sight import Condition, Rank, Sight, entered
from rallypoint.diagnosis.waits import Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """A main clause, for one rank or several that do the same.

    Attributes:
        key: ranks with equal keys are reported together.
        text: contains ``{who}`` for the ranks, and ``{it is}`` for "it is" or "they are".
        tells_call: whether it has named the call in which others wait.
        pronoun: whether those who wait do so "for it", as it is about ranks.
        extra: the part that may be left out if the text gets too long.
        remedy: what to do.
    """

    key: object
    text: str
    tells_call: bool = False
    pronoun: bool = True
    extra: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, text: str) -> Lead:
        """A lead of a text alone, which names the call."""
        return cls(key=text, text=text, tells_call=True, pronoun=False)


def lead_of(rank: Rank, why: Obstacle, direct: Sequence[Wait]) -> Lead:
    """The lead about what prevents this rank from arriving."""
    if why.cause is Cause.SILENT:
        text = f"{why.owner} {why.words}: {{who}}"
        return Lead(key=text, text=text, remedy=why.remedy)
    if why.owner:
        return _of_its_own(rank, why, direct)
    if rank.condition in _LEFT_OUT:
        last = _last_done(rank)
        return Lead(
            key=(why.words, last, why.remedy),
            text=f"{{who}} {why.words}",
            extra=f"; its last done was {last}" if last and direct else "",
            remedy=why.remedy,
        )
    return _of_one_elsewhere(rank, why, direct)


_LEFT_OUT = (
    *(Condition.KILLED, Condition.ENDED, Condition.RAISED),
    *(Condition.STOPPED, Condition.TRACED),
)


def _of_its_own(rank: Rank, why: Obstacle, direct: Sequence[Wait]) -> Lead:
    """The lead about a child process of a rank."""
    if why.owner == "data loader":
        waited = "is what all wait for" if len(direct) > 1 else "is waited for"
        text = f"rank {rank.rank}'s data loader {waited}: {why.words}"
    else:
        text = f"rank {rank.rank}'s {why.owner} {why.words}"
    return Lead(key=text, text=text, pronoun=False)


def _of_one_elsewhere(rank: Rank, why: Obstacle, direct: Sequence[Wait]) -> Lead:
    wait = longest(direct)
    if why.cause is Cause.HOLDS_GIL:
        text = f"{{who}} {why.words}{_cannot_return(rank)}"
        return Lead(key=text, text=text)
    if wait.group is None or wait.call is None:
        if wait.strength is Strength.TOLD and not rank.groups:
            text = f"{{who}} never joined the group: {{it}} {why.words}"
            return Lead(key=text, text=text)
        text = f"{{who}} {why.words}"
        return Lead(key=text, text=text, extra="; operation numbers unknown")
    absence = _absence(rank, wait)
    text = f"{{who}} {absence}: {{it}} {why.words}" if absence else f"{{who}} {why.words}"
    return Lead(key=text, text=text, tells_call="entered" in absence)


def _absence(rank: Rank, wait: Wait) -> str:
    """How it is known that a rank is not in the call; empty if that is not the question."""
    assert wait.group is not None and wait.call is not None
    theirs = rank.groups.get(wait.group.key)
    name = f"{wait.words} of {wait.group.name}"
    if theirs is None:
        if rank.has_record:
            return f"never joined the group {wait.group.name}"
        return f"probably never entered {name}"
    if wait.call.peer is not None or entered(theirs) >= wait.call.number:
        return ""
    probably = "probably " if wait.strength is Strength.INFERRED else ""
    left = " (it has left the group)" if theirs.has_left else ""
    return f"{probably}never entered {name}{left}"


def _cannot_return(rank: Rank) -> str:
    for group in rank.groups.values():
        for call in group.calls[-1:]:
            if call.state == "running":
                return f"; its {numbered(call)} cannot return"
    return ""


def lead_of_flow(sight: Sight, peer: str, direct: Sequence[Wait]) -> Lead:
    """The lead about a connection that transmits nothing."""
    flows = [
        flow
        for rank in sight
        if rank.node
        for flow in rank.node.flows
        if flow.peer == peer and flow.rank == rank.rank
    ]
    stalled_s = max(flow.stalled_s for flow in flows)
    again = max(flow.retransmits for flow in flows)
    call = direct[0].call
    entered_what = f"#{call.number}" if call and call.peer is None else direct[0].words
    of = ""
    if call and call.peer is None and direct[0].group:
        of = f" ({call.operation} of {direct[0].group.name})"
    return Lead.of(
        f"all entered {entered_what}{of}; nothing arrives from host {peer} for "
        f"{seconds(stalled_s)} ({again} retransmits)"
    )


def longest(waits: Sequence[Wait]) -> Wait:
    """The wait to report: in the call in which most ranks wait, the one that began first."""
    by_call: dict[object, list[Wait]] = {}
    for wait in waits:
        by_call.setdefault(call_key(wait), []).append(wait)
    most = max(by_call.values(), key=lambda each: (len(each), each[0].for_s or 0.0))
    return max(most, key=lambda wait: wait.for_s or 0.0)


def call_key(wait: Wait) -> object:
    """A key that is equal for ranks in the same call."""
    return (wait.group.key if wait.group else "", wait.words)


def _last_done(rank: Rank) -> str:
    done = [call for group in rank.groups.values() for call in group.calls if call.state == "done"]
    # The clock is coarse: of the calls that ended at the same tick, the last is the one that began
    # last.
    latest = max(done, key=lambda call: (call.ended_ns, call.since_ns, call.number), default=None)
    return "" if latest is None else numbered(latest)
