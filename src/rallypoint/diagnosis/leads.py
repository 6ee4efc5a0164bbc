"""The first part of the sentence: which rank does what, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.diagnosis import attendance as mismatches
from rallypoint.diagnosis.activity import short_site
from rallypoint.diagnosis.attendance import members_in
from rallypoint.diagnosis.causes import Obstacle
from rallypoint.diagnosis.explanation import Cause, Strength
from rallypoint.diagnosis.graph import Needs, Node, smallest_cycle
from rallypoint.diagnosis.phrases import items, listed, numbered, seconds, signature, some_ranks
from rallypoint.diagnosis.sight import Condition, Rank, Sight, entered, members_of
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


_MOST_SITES = 2
_MOST_IN_WORDS = 5  # ranks of a cycle


def circle(waits: Sequence[Wait], needs: Needs, stuck: frozenset[Node]) -> list[Wait]:
    """The waits of a shortest cycle in order: each for the next one's rank, the last for the
    first's.
    """
    nodes = smallest_cycle(needs, stuck)
    return [
        next(
            wait
            for wait in waits
            if wait.rank == node
            and any(target in clause and clause <= stuck for clause in wait.clauses)
        )
        for node, target in zip(nodes, (*nodes[1:], *nodes[:1]), strict=True)
    ]


def lead(sight: Sight, waits: Sequence[Wait], *, probably: bool) -> Lead:
    """The cycle in words."""
    perhaps = "probably a " if probably else ""
    tags = _wrong_tags(sight, waits)
    if tags:
        return Lead.of(tags)
    if all(wait.call is not None and wait.call.peer is not None for wait in waits):
        return Lead.of(f"{perhaps}deadlock: {_of_transfers(waits)}")
    groups = {wait.group.key for wait in waits if wait.group}
    across = " across groups" if len(groups) > 1 else ""
    places = list(dict.fromkeys(wait.site for wait in waits if wait.site))
    first = waits[0]
    text = f"rank {first.rank} waits in {_named(first)} for rank {waits[1 % len(waits)].rank}"
    for wait, target in zip(waits[1:], [*waits[2:], first], strict=True):
        text += f", which waits in {_named(wait)} for rank {target.rank}"
    sites = f" ({listed(places, _MOST_IN_WORDS)})" if places else ""
    return Lead.of(f"{perhaps}deadlock{across}: {text}{sites}")


def _named(wait: Wait) -> str:
    return f"{wait.words} of {wait.group.name}" if wait.group and wait.call else wait.words


def _of_transfers(waits: Sequence[Wait]) -> str:
    """``rank 0 waits for rank 1 in recv (tag 0, p.py:7), rank 1 for rank 0``."""
    parts: list[str] = []
    told = ""
    for wait, target in zip(waits, [*waits[1:], waits[0]], strict=True):
        assert wait.call is not None and wait.call.peer is not None
        details = ", ".join(filter(None, [f"tag {wait.call.root}", wait.site]))
        how = f" in {wait.call.operation} ({details})"
        verb = "" if parts else " waits"
        whom = f"rank {target.rank}{' or any other' if wait.call.peer < 0 else ''}"
        parts.append(f"rank {wait.rank}{verb} for {whom}{'' if how == told else how}")
        told = how
    if len(parts) > _MOST_IN_WORDS:
        more = len(parts) - _MOST_IN_WORDS
        parts = [*parts[: _MOST_IN_WORDS - 1], f"and so on by {more} more ranks", parts[-1]]
    return ", ".join(parts)


def _wrong_tags(sight: Sight, waits: Sequence[Wait]) -> str:
    """If two calls match, or would match except for the tag, the text that says so."""
    for wait in waits:
        came = came_instead(sight, wait)
        if came:
            return f"{came}: neither can go on"
    if len(waits) != 2 or waits[0].group is None or waits[1].group is None:
        return ""
    calls = {
        wait.call.operation: wait for wait in waits if wait.call and wait.call.peer is not None
    }
    if set(calls) != {"send", "recv"} or waits[0].group.key != waits[1].group.key:
        return ""
    send, recv = calls["send"], calls["recv"]
    assert send.call is not None and recv.call is not None
    if send.call.root == recv.call.root:
        return ""
    places = listed([wait.site for wait in (send, recv) if wait.site], _MOST_SITES)
    return (
        f"rank {send.rank} sent tag {send.call.root} to rank {recv.rank}, which waits for tag "
        f"{recv.call.root}{f' ({places})' if places else ''}: neither can go on"
    )


def came_instead(sight: Sight, wait: Wait) -> str:
    """The message that a receive got instead of the one that it waits for, if known."""
    call, group = wait.call, wait.group
    if call is None or group is None or call.came_tag is None or call.peer is None:
        return ""
    members = members_in(group, sight)
    if not 0 <= call.peer < len(members):
        return ""
    place = f" ({wait.site})" if wait.site else ""
    return (
        f"rank {members[call.peer]} sent tag {call.came_tag} to rank {wait.rank}, which waits for "
        f"tag {call.root}{place}"
    )


def mismatch(sight: Sight, wait: Wait, number: int) -> tuple[Lead, tuple[int, ...], Strength]:
    """Who called what; also the ranks that differ from most."""
    assert wait.group is not None
    key, name = wait.group.key, wait.group.name
    members = members_of(wait.group) or tuple(sight.ranks)
    sides = mismatches.sides(
        [(rank, sight.ranks[rank].groups.get(key)) for rank in members if rank in sight.ranks],
        number,
    )
    is_told = wait.group.backend == "rallypoint"
    bare = any(not items(side[0][2]) for side in sides)
    parts = []
    for side in sides:
        ranks = some_ranks(rank for rank, _, _ in side)
        group, call = side[0][1:]
        sites = sorted({short_site(each.site) for _, _, each in side if each.site}) or sorted(
            {sight.ranks[rank].activity.site for rank, _, _ in side} - {""}
        )
        place = f" at {listed(sites, _MOST_SITES)}" if sites else ""
        parts.append(
            f"{ranks} in {numbered(call)}{place}"
            if bare
            else f"{ranks} {signature(call, group)}{place}"
        )
    # In a group of two, or with equal halves, neither side differs more than the other.
    odd = [rank for side in sides[:-1] for rank, _, _ in side]
    probably = "" if is_told else "probably "
    text = (
        f"{probably}ranks called different operations as #{number} of {name}: "
        f"{(', ' if bare else '; ').join(parts)}"
    )
    return Lead.of(text), tuple(odd), Strength.TOLD if is_told else Strength.INFERRED
