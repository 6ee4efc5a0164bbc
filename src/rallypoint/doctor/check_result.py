"""The result of a check: its severity, the nodes, the problem, and the advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

Pair = tuple[int, int]  # numbers of nodes: who calls, and whom


class Severity(IntEnum):
    """The worse, the more."""

    GREEN = 0
    YELLOW = 1
    RED = 2

    @property
    def word(self) -> str:
        """For users."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, reported once.

    Attributes:
        check: the number of the check, from 1 to 16.
        where: the names of the nodes concerned; empty for the job as a whole.
        what: what is wrong; `advice`: what to do.
        explains: pairs of nodes that cannot communicate for this reason; what other checks find
            there is a consequence.
    """

    level: Severity
    check: int
    where: tuple[str, ...]
    what: str
    advice: str
    explains: frozenset[Pair] = frozenset()

    def text(self, nodes: int) -> str:
        """The finding as a line; `nodes`: the number of nodes in the job."""
        who = "all nodes" if 1 < nodes == len(self.where) else listed(self.where)
        begin = f"{who}: " if who and nodes > 1 else ""
        return f"{begin}{self.what}; {self.advice}"


def listed(names: tuple[str, ...], most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def by_value(told: Sequence[tuple[str, str]]) -> str:
    """Pairs of a node's name and a value: ``"MTU 9000 on host1, host2; MTU 1500 on host3"``."""
    values: dict[str, list[str]] = {}
    for name, value in told:
        values.setdefault(value, []).append(name)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in values.items())


def collapse(findings: list[Finding]) -> list[Finding]:
    """Merge equal findings on several nodes into one; the most severe first."""
    found: dict[tuple[int, int, str, str], Finding] = {}
    for each in findings:
        key = (-each.level, each.check, each.what, each.advice)
        before = found.get(key)
        if before is None:
            found[key] = each
        else:
            where = tuple(dict.fromkeys([*before.where, *each.where]))
            explains = before.explains | each.explains
            found[key] = replace(before, where=where, explains=explains)
    return sorted(found.values(), key=lambda each: (-each.level, each.check))
