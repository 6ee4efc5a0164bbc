"""The answer to "why is my job stuck, slow or dead?", as data.

Each claim shows how certain it is: facts from the kernel or a record are stated plainly, inferences
with "probably", and unknown causes with "cannot tell, because ...".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rallypoint.diagnosis.stragglers import Lateness

MOST_CHARACTERS = 240  # limit for the sentence
MOST_EVIDENCE = 12  # lines


class Verdict(Enum):
    """Whether the job hangs, and whether it is known why."""

    NO_HANG = "no hang"
    EXPLAINED = "hang explained"
    UNEXPLAINED = "hang not explained"


class Strength(Enum):
    """How certain a claim is."""

    CERTAIN = "told"
    INFERRED = "probably"
    UNKNOWN = "cannot tell"

    @property
    def adverb(self) -> str:
        """``"probably "``, for an inference; otherwise empty."""
        return "probably " if self is Strength.INFERRED else ""


class Cause(Enum):
    """What prevents a rank from arriving; in the order of reporting."""

    KILLED = "killed"
    ENDED = "ended"
    RAISED = "raised"
    STOPPED = "stopped"
    SILENT = "silent"
    IN_KERNEL = "in the kernel"
    HOLDS_GIL = "holds the GIL"
    MISMATCH = "different operations"
    DEADLOCK = "deadlock"
    NETWORK = "network"
    ELSEWHERE = "elsewhere"
    TRANSPORT = "transport"
    NOT_SEEN = "not seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Ranks that wait in the same way.

    Attributes:
        waits_for: ranks; if `any_of` is set, one of them is enough, otherwise all are needed.
        group, operation, number: the call in which it waits; number: the call's number, or the tag
            of a send or recv; None if unknown.
        site: the line of their program, or empty.
        for_s: the time since the first of them began the call; None if unknown.
    """

    ranks: tuple[int, ...]
    waits_for: tuple[int, ...]
    any_of: bool
    group: str
    operation: str
    number: int | None
    site: str
    for_s: float | None
    strength: Strength


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Something that must change so that others can proceed.

    Attributes:
        ranks: the ranks concerned; empty if it is not a rank.
        text: what it does, in words.
        waited_for_by: the ranks that wait for it, directly or indirectly.
        pids: the process numbers of these ranks, as far as known.
    """

    ranks: tuple[int, ...]
    cause: Cause
    text: str
    strength: Strength
    waited_for_by: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer.

    Attributes:
        sentence: the answer in one line of at most 240 characters.
        evidence: the facts that support it, at most 12 lines.
        roots: the first one is the subject of the sentence.
        knot: ranks that wait for each other in a cycle: each for the next, the last one for the
            first.
        slow: the ranks that keep the others waiting in each step, if nothing hangs; the worst
            first.
    """

    kind: Verdict
    sentence: str
    evidence: tuple[str, ...] = ()
    roots: tuple[Root, ...] = ()
    edges: tuple[Edge, ...] = ()
    knot: tuple[int, ...] = ()
    slow: tuple[Lateness, ...] = ()

    @property
    def exit_status(self) -> int:
        """0: nothing hangs; 3: the hang is explained; 4: it is not."""
        return {Verdict.NO_HANG: 0, Verdict.EXPLAINED: 3, Verdict.UNEXPLAINED: 4}[self.kind]

    def to_json(self) -> dict[str, object]:
        """The answer for programs, in values that `json` can write."""
        return {
            "verdict": self.kind.value,
            "exit_status": self.exit_status,
            "sentence": self.sentence,
            "evidence": list(self.evidence),
            "roots": [
                {
                    "ranks": list(root.ranks),
                    "cause": root.cause.value,
                    "text": root.text,
                    "strength": root.strength.value,
                    "waited_for_by": list(root.waited_for_by),
                    "pids": list(root.pids),
                }
                for root in self.roots
            ],
            "edges": [
                {
                    "ranks": list(edge.ranks),
                    "waits_for": list(edge.waits_for),
                    "any_of": edge.any_of,
                    "group": edge.group,
                    "operation": edge.operation,
                    "number": edge.number,
                    "site": edge.site or None,
                    "for_s": None if edge.for_s is None else round(edge.for_s, 3),
                    "strength": edge.strength.value,
                }
                for edge in self.edges
            ],
            "knot": list(self.knot),
            "slow": [
                {
                    "rank": each.rank,
                    "share": round(each.share, 3),
                    "late_s": round(each.late_s_per_step, 6),
                    "step_s": None if each.step_s is None else round(each.step_s, 6),
                }
                for each in self.slow
            ],
        }
