"""Which hangs to report, from workers' complaints and what was then seen of the job. Pure.

A worker that has waited for too long complains, and the whole job is inspected as by `rallypoint
explain` (hang_watch.py). A hang is reported once, if the worker is part of it; again only for
another root cause or other calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rallypoint.base.record import Record

# Of the time after which a wait is long, where ranks wait for one that a signal has stopped: it
# cannot just be computing.
STOPPED_SHARE = 0.1
_STOPPED, _RAISED = "stopped", "raised"  # these causes, as `explain` names them
_ALMOST = 0.9  # of the time; clocks are coarse
_EXPLAINED = 3  # the status that `explain` would exit with


class Hang(Record, kw_only=True):
    """One hang.

    Attributes:
        sentence: the cause, as `explain` words it.
        is_explained: the cause is known, and not only that the job hangs.
        rank: the rank at fault, or else one that waits.
        ranks: those at fault, and all that wait for them.
        root: the cause, and the ranks at fault.
        calls: the calls in which ranks wait.
    """

    sentence: str
    is_explained: bool
    rank: int
    ranks: frozenset[int]
    root: tuple[str, tuple[int, ...]]
    calls: frozenset[tuple[str, str, int | None]]

    @property
    def text(self) -> str:
        """The line for the user."""
        return f"the job {'hangs' if self.is_explained else 'may hang'}: {self.sentence}"

    @property
    def past(self) -> str:
        """The same, after the job was ended for it; part of a sentence."""
        verb = "hung" if self.is_explained else "may have hung"
        return f"the job {verb}: {self.sentence.removesuffix('.')}"

    @property
    def waiting(self) -> frozenset[int]:
        """The ranks that wait for those at fault."""
        return self.ranks - set(self.root[1])

    @property
    def event(self) -> dict[str, object]:
        """The event for programs."""
        cause, ranks = self.root
        return {
            "sentence": self.sentence,
            "is_explained": self.is_explained,
            "cause": cause,
            "ranks": list(ranks),
            "waiting": sorted(self.waiting),
        }

    def is_same(self, other: Hang) -> bool:
        """Whether both are the same hang for the user."""
        return self.root == other.root and (
            self.calls == other.calls or not self.calls.isdisjoint(other.calls)
        )


class Hangs:
    """The hangs of one round.

    Args:
        after_s: shorter waits are ignored.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._complaining: set[int] = set()
        self._told: Hang | None = None

    def complains(self, rank: int) -> None:
        """That rank has waited for too long."""
        self._complaining.add(rank)

    def goes_on(self, rank: int, *, was_stopped: bool = False) -> bool:
        """That rank no longer waits, or is not stopped now. Returns whether this ends a told hang.

        One at fault may have waited for something else; but in a circle all are.
        """
        self._complaining.discard(rank)
        told = self._told
        if told is None:
            return False
        ended_by = told.root[1] if was_stopped else told.waiting or told.ranks
        if rank not in ended_by or (was_stopped and told.root[0] != _STOPPED):
            return False
        self._told = None
        return True

    def judge(self, explanation: Mapping[str, Any]) -> Hang | None:
        """The hang to report, if the job's explanation is one."""
        hang = _hang(explanation, self._after_s)
        if hang is None or hang.ranks.isdisjoint(self._complaining):
            return None
        if self._told is not None and self._told.is_same(hang):
            return None
        self._told = hang
        return hang


def _hang(explanation: Mapping[str, Any], after_s: float) -> Hang | None:
    if not explanation.get("exit_status") or not explanation["roots"]:
        return None
    root = explanation["roots"][0]
    ranks = frozenset([*root["ranks"], *root["waited_for_by"]])
    edges = [edge for edge in explanation["edges"] if not ranks.isdisjoint(edge["ranks"])]
    known = [edge["for_s"] for edge in edges if edge["for_s"] is not None]
    is_stopped = root["cause"] == _STOPPED
    share = STOPPED_SHARE if is_stopped else 1.0
    # One that has raised an exception has not ended for that long already, as its agent has seen.
    is_short = known and max(known) < _ALMOST * share * after_s and root["cause"] != _RAISED
    if not ranks or is_short:
        return None
    if is_stopped and not root["waited_for_by"]:
        return None  # the others compute still
    return Hang(
        sentence=str(explanation["sentence"]),
        is_explained=explanation["exit_status"] == _EXPLAINED,
        rank=min(root["ranks"] or ranks),
        ranks=ranks,
        root=(root["cause"], tuple(root["ranks"])),
        calls=frozenset((edge["group"], edge["operation"], edge["number"]) for edge in edges),
    )
