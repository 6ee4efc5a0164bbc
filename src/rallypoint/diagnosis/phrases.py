"""Calls, times and ranks in words: the same in every sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rallypoint.base.collective import reduces, root_argument
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.base.wording import brief, name_ranks

_PLURALS = {
    "is": "are",
    "was": "were",
    "has": "have",
    "waits": "wait",
    "runs": "run",
    "uses": "use",
    "holds": "hold",
    "collects": "collect",
    "compiles": "compile",
}
_MOST_OF_RANKS = 48  # characters


def some_ranks(ranks: Iterable[int]) -> str:
    """``ranks 0-2``; many scattered ones are counted."""
    listed = sorted(ranks)
    text = name_ranks(listed)
    if len(text) <= _MOST_OF_RANKS:
        return text
    return f"{len(listed)} ranks ({', '.join(map(str, listed[:3]))}, ...)"


def does(words: str, count: int) -> str:
    """A predicate for this many ranks: ``is in time.sleep``, ``are in time.sleep``."""
    verb, space, rest = words.partition(" ")
    return words if count == 1 else f"{_PLURALS.get(verb, verb)}{space}{rest}"


def seconds(duration_s: float) -> str:
    """``40 ms``, ``12.0 s``, ``340 s``, ``25 min``."""
    if duration_s < 100:
        return brief(duration_s)
    return f"{duration_s:.0f} s" if duration_s < 600 else f"{duration_s / 60:.0f} min"


def shortened(text: str, most: int) -> str:
    """At most this many characters, and an ellipsis if words are left out at the end."""
    if len(text) <= most:
        return text
    words, _, rest = text[:most].rpartition(" ")
    return f"{words or rest} ..."


def numbered(call: RecordedCall) -> str:
    """``all_reduce #17``, or ``recv, tag 7``; some records know only the number."""
    if call.peer is not None:
        return f"{call.operation}, tag {call.root}"
    return f"{call.operation or 'operation'} #{call.number}"


def items(call: RecordedCall) -> str:
    """``float32[2, 4]``, or empty if that is not known."""
    if call.shape:
        return f"{call.dtype}[{', '.join(map(str, call.shape))}]"
    return f"{call.dtype}[{call.count}]" if call.count and call.dtype else ""


def knows_root(call: RecordedCall, group: RecordedGroup) -> bool:
    """Whether the record has the root of a collective."""
    return (
        root_argument(call.operation) != ""
        and group.backend == "rallypoint"
        and group.global_rank(call.root) is not None
    )


def details(call: RecordedCall, group: RecordedGroup) -> str:
    """``float32[8], SUM``: what must be equal on all ranks."""
    parts = [items(call)]
    if reduces(call.operation) and call.operator:
        parts.append(call.operator)
    if knows_root(call, group):
        parts.append(f"{root_argument(call.operation)} {group.global_rank(call.root)}")
    return ", ".join(filter(None, parts))


def times(count: int) -> str:
    """``once``, ``twice``, ``3 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def listed(parts: Sequence[str], most: int) -> str:
    """Joined by commas; parts beyond `most` are left out."""
    return ", ".join(parts[:most]) + (", ..." if len(parts) > most else "")
