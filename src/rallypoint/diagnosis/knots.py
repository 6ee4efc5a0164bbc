"""Ranks that wait for each other in a cycle, or that called different operations, in words."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.diagnosis import mismatch as mismatches
from rallypoint.diagnosis.activity import short_site
from rallypoint.diagnosis.attendance import members_in
from rallypoint.diagnosis.explanation import Strength
from rallypoint.diagnosis.graph import Needs, Node, smallest_cycle
from rallypoint.diagnosis.leads import Lead
from rallypoint.diagnosis.phrases import items, listed, numbered, signature, some_ranks
from rallypoint.diagnosis.sight import Sight, members_of
from rallypoint.diagnosis.waits import Wait

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
