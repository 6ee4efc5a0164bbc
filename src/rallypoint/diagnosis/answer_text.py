"""An answer in words: the headline of a finding, its sentence, and the evidence for it.

The sentence: WHO DOES WHAT WHERE; WHO WAITS, WHERE, FOR HOW LONG; WHAT TO DO. The headline is its
first part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from rallypoint.diagnosis.activity import is_users, main_stack, short_site
from rallypoint.diagnosis.causes import Obstacle
from rallypoint.diagnosis.explanation import MOST_CHARACTERS, MOST_EVIDENCE, Cause, Strength
from rallypoint.diagnosis.graph import Needs, Node, smallest_cycle
from rallypoint.diagnosis.job_state import JobState, Rank, entered
from rallypoint.diagnosis.phrases import (
    details,
    does,
    items,
    listed,
    numbered,
    seconds,
    shortened,
    some_ranks,
    times,
)
from rallypoint.diagnosis.waits import Wait, sides

_MOST_SITES = 2
_MOST_IN_WORDS = 5  # ranks of a cycle
_MOST_ROOTS = 3
_MOST_FRAMES = 4
_MOST_CALLS = 4


@dataclass(frozen=True, slots=True)
class Headline:
    """A main clause, for one rank or several that do the same.

    Attributes:
        text: contains ``{who}`` for the ranks, and ``{it}`` for "it" or "they".
        names_call: whether it has named the call in which others wait.
        is_about_ranks: whether the waiting ranks do so "for it".
        last_done: the last call that was done, where that distinguishes ranks.
        extra: the part that may be left out if the text gets too long.
        remedy: what to do.
    """

    text: str
    _: KW_ONLY
    names_call: bool = False
    is_about_ranks: bool = True
    last_done: str = ""
    extra: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, text: str) -> Headline:
        """A headline of a text alone, which names the call."""
        return cls(text, names_call=True, is_about_ranks=False)

    @property
    def key(self) -> object:
        """Ranks with equal keys are reported together."""
        return (self.text, self.last_done, self.remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """One problem.

    Attributes:
        ranks: the ranks that it is about.
        waits: those of the ranks that wait for it directly.
        waiters: all ranks that wait for it, directly or indirectly.
        named: those of the waiters that the headline names.
        is_secondary: it is about a rank that ended because one of its calls failed.
    """

    cause: Cause
    ranks: tuple[int, ...]
    headline: Headline
    waits: tuple[Wait, ...] = ()
    waiters: tuple[int, ...] = ()
    named: tuple[int, ...] = ()
    strength: Strength = Strength.CERTAIN
    is_secondary: bool = False
    when_ns: int = 0

    @property
    def order(self) -> tuple[int, int, int, int, tuple[int, ...]]:
        """The sort key: what is reported first."""
        cause = list(Cause).index(self.cause)
        return self.is_secondary, cause, -len(self.waiters), self.when_ns, self.ranks


def rank_headline(rank: Rank, why: Obstacle, direct: Sequence[Wait]) -> Headline:
    """What prevents this rank from arriving, where these waits are for it."""
    text = f"{{who}} {why.words}"
    if why.cause is Cause.SILENT:
        return Headline(f"{why.owner} {why.words}: {{who}}")
    if why.owner:
        waited = ""
        if why.owner == "data loader":
            waited = "is what all wait for: " if len(direct) > 1 else "is waited for: "
        text = f"rank {rank.rank}'s {why.owner} {waited}{why.words}"
        return Headline(text, is_about_ranks=False)
    if rank.condition.is_final:
        last = _last_done(rank)
        extra = f"; its last done was {last}" if last and direct else ""
        return Headline(text, last_done=last, extra=extra, remedy=why.remedy)
    if why.cause is Cause.HOLDS_GIL:
        return Headline(f"{text}{_cannot_return(rank)}")
    return _of_absent(rank, why.words, reported_waits(direct)[0])


def _of_absent(rank: Rank, words: str, wait: Wait) -> Headline:
    """How it is known that a rank is not in the call, if that is the question, and what it does."""
    if wait.group is None or wait.call is None:
        if wait.strength is Strength.CERTAIN and not rank.groups:
            return Headline(f"{{who}} never joined the group: {{it}} {words}")
        return Headline(f"{{who}} {words}", extra="; operation numbers unknown")
    theirs = rank.groups.get(wait.group.key)
    never_entered = f"never entered {wait.full_name}"
    absence = ""
    if theirs is None and rank.has_record:
        absence = f"never joined the group {wait.group.name}: {{it}} "
    elif theirs is None:
        absence = f"probably {never_entered}: {{it}} "
    elif wait.call.peer is None and entered(theirs) < wait.call.number:
        left = " (it has left the group)" if theirs.has_left else ""
        absence = f"{wait.strength.adverb}{never_entered}{left}: {{it}} "
    return Headline(f"{{who}} {absence}{words}", names_call=never_entered in absence)


def _cannot_return(rank: Rank) -> str:
    for group in rank.groups.values():
        for call in group.calls[-1:]:
            if call.state == "running":
                return f"; its {numbered(call)} cannot return"
    return ""


def _last_done(rank: Rank) -> str:
    done = [call for group in rank.groups.values() for call in group.calls if call.state == "done"]
    # The clock is coarse: of the calls that ended at the same tick, the last is the one that began
    # last.
    latest = max(done, key=lambda call: (call.ended_ns, call.since_ns, call.number), default=None)
    return "" if latest is None else numbered(latest)


def flow_headline(job: JobState, peer: str, direct: Sequence[Wait]) -> Headline:
    """A connection that transmits nothing."""
    flows = [
        flow
        for rank in job
        if rank.node
        for flow in rank.node.flows
        if flow.peer == peer and flow.rank == rank.rank
    ]
    stalled_s = max(flow.stalled_s for flow in flows)
    again = max(flow.retransmits for flow in flows)
    call, group = direct[0].call, direct[0].group
    entered_what = direct[0].words
    if call and group and call.peer is None:
        entered_what = f"#{call.number} ({call.operation} of {group.name})"
    return Headline.of(
        f"all entered {entered_what}; nothing arrives from host {peer} for "
        f"{seconds(stalled_s)} ({again} retransmits)"
    )


def reported_waits(waits: Sequence[Wait]) -> list[Wait]:
    """The waits in the call in which most ranks wait, the longest first."""
    by_call: dict[object, list[Wait]] = {}
    for wait in waits:
        by_call.setdefault(wait.key, []).append(wait)
    most = max(by_call.values(), key=lambda each: (len(each), each[0].for_s or 0.0))
    return sorted(most, key=lambda wait: wait.for_s or 0.0, reverse=True)


def shortest_cycle(waits: Sequence[Wait], needs: Needs, stuck: frozenset[Node]) -> list[Wait]:
    """The waits of a shortest cycle: each for the next one's rank, the last for the first's."""
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


def deadlock_headline(job: JobState, cycle: Sequence[Wait], strength: Strength) -> Headline:
    """A cycle of waits."""
    perhaps = "" if strength is Strength.CERTAIN else "probably a "
    if tags := _wrong_tags(job, cycle):
        return Headline.of(f"{tags}: neither can continue")
    if all(wait.is_in_transfer for wait in cycle):
        return Headline.of(f"{perhaps}deadlock: {_of_transfers(cycle)}")
    across = " across groups" if len({wait.group.key for wait in cycle if wait.group}) > 1 else ""
    steps = [
        f"waits in {wait.full_name} for rank {target.rank}"
        for wait, target in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    sites = _in_brackets(dict.fromkeys(wait.site for wait in cycle), _MOST_IN_WORDS)
    text = f"rank {cycle[0].rank} {', which '.join(steps)}{sites}"
    return Headline.of(f"{perhaps}deadlock{across}: {text}")


def _of_transfers(cycle: Sequence[Wait]) -> str:
    """``rank 0 waits for rank 1 in recv (tag 0, p.py:7), rank 1 for rank 0``."""
    parts: list[str] = []
    latest = ""
    for wait, target in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        assert wait.call is not None and wait.call.peer is not None
        tag_and_site = ", ".join(filter(None, [f"tag {wait.call.root}", wait.site]))
        how = f" in {wait.operation} ({tag_and_site})"
        verb = "" if parts else " waits"
        whom = f"rank {target.rank}{' or any other' if wait.call.peer < 0 else ''}"
        parts.append(f"rank {wait.rank}{verb} for {whom}{'' if how == latest else how}")
        latest = how
    if len(parts) > _MOST_IN_WORDS:
        more = len(parts) - _MOST_IN_WORDS
        parts = [*parts[: _MOST_IN_WORDS - 1], f"and so on by {more} more ranks", parts[-1]]
    return ", ".join(parts)


def _wrong_tags(job: JobState, cycle: Sequence[Wait]) -> str:
    """The text for two calls that match, or would match except for the tag."""
    if came := next(filter(None, (unexpected_message(job, wait) for wait in cycle)), ""):
        return came
    calls = {wait.operation: (wait, wait.call) for wait in cycle if wait.call}
    if len(cycle) != 2 or calls.keys() != {"send", "recv"}:
        return ""
    (send, sent), (receive, wanted) = calls["send"], calls["recv"]
    if send.group_key != receive.group_key or sent.root == wanted.root:
        return ""
    return _tags(send.rank, sent.root, receive, wanted.root, [send.site, receive.site])


def unexpected_message(job: JobState, wait: Wait) -> str:
    """The message that a receive got instead of the one that it waits for, if known."""
    call, group = wait.call, wait.group
    if call is None or group is None or call.came_tag is None or call.peer is None:
        return ""
    members = job.members(group)
    if not 0 <= call.peer < len(members):
        return ""
    return _tags(members[call.peer], call.came_tag, wait, call.root, [wait.site])


def _tags(sender: int, sent: int, receive: Wait, wanted: int, sites: Iterable[str]) -> str:
    return (
        f"rank {sender} sent tag {sent} to rank {receive.rank}, which waits for tag {wanted}"
        f"{_in_brackets(sites, _MOST_SITES)}"
    )


def _in_brackets(sites: Iterable[str], most: int) -> str:
    text = listed([each for each in sites if each], most)
    return f" ({text})" if text else ""


def mismatch_headline(
    job: JobState, wait: Wait, number: int
) -> tuple[Headline, tuple[int, ...], Strength]:
    """Who called what; also the ranks that differ from most."""
    assert wait.group is not None
    found = sides(job, wait.group, number)
    strength = Strength.CERTAIN if wait.group.backend == "rallypoint" else Strength.INFERRED
    bare = any(not items(side[0][2]) for side in found)
    parts = []
    for side in found:
        ranks = some_ranks(rank for rank, _, _ in side)
        _, group, call = side[0]
        sites = sorted({short_site(each.site) for _, _, each in side if each.site}) or sorted(
            {job.ranks[rank].activity.site for rank, _, _ in side} - {""}
        )
        site = f" at {listed(sites, _MOST_SITES)}" if sites else ""
        what = f"in {numbered(call)}" if bare else f"{call.operation}({details(call, group)})"
        parts.append(f"{ranks} {what}{site}")
    # In a group of two, or with equal halves, neither side differs more than the other.
    odd = tuple(rank for side in found[:-1] for rank, _, _ in side)
    text = (
        f"{strength.adverb}ranks called different operations as #{number} of "
        f"{wait.group.name}: {(', ' if bare else '; ').join(parts)}"
    )
    return Headline.of(text), odd, strength


def unnumbered_headline(sides: Iterable[Sequence[Rank]]) -> Headline:
    """The operations in which ranks are, by their stacks: those of each side are in the same."""
    parts = []
    for side in sides:
        sites = listed(sorted({rank.activity.site for rank in side}), _MOST_SITES)
        ranks = some_ranks(rank.rank for rank in side)
        parts.append(f"{ranks} in {side[0].activity.waits_in} at {sites}")
    return Headline.of(f"probably ranks called different operations: {', '.join(parts)}")


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
