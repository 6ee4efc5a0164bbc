"""The answer to "why is my job stuck, slow or dead?", as data.

Each claim shows how certain it is: facts from the kernel or a record are stated plainly, inferences
with "probably", and unknown causes with "cannot tell, because ...".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MOST_CHARACTERS = 240  # of the sentence
MOST_EVIDENCE = 12  # lines


class Kind(Enum):
    """Whether the job hangs, and whether it is known why."""

    NO_HANG = "no hang"
    EXPLAINED = "hang explained"
    UNEXPLAINED = "hang not explained"


class Strength(Enum):
    """How well a claim is known."""

    TOLD = "told"
    INFERRED = "probably"
    UNKNOWN = "cannot tell"


class Cause(Enum):
    """What keeps a rank; what comes first here is told first."""

    KILLED = "killed"
    ENDED = "ended"
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

    @property
    def order(self) -> int:
        """Its place among all."""
        return list(Cause).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Ranks wait, alike.

    Attributes:
        waits_for: ranks; with `any_of` one of them is enough, else all are needed.
        group, operation, number: the call in which it waits; number: the tag of a send or recv,
            None: not known.
        site: the line of their program, or empty.
        for_s: since the first of them began the call; None: not known.
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
    """What must change so that others can go on.

    Attributes:
        ranks: who, or nobody if it is no rank.
        text: what it does, in words.
        waited_for_by: the ranks that wait for it, directly or not.
        pids: of these ranks' processes, as far as they are known.
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
        sentence: all in one line of at most 240 characters.
        evidence: what it rests on, at most 12 lines.
        roots: the first is the one that the sentence is about.
        knot: ranks each of which waits for the next, the last one for the first.
    """

    kind: Kind
    sentence: str
    evidence: tuple[str, ...] = ()
    roots: tuple[Root, ...] = ()
    edges: tuple[Edge, ...] = ()
    knot: tuple[int, ...] = ()

    @property
    def exit_status(self) -> int:
        """0: nothing hangs; 3: the hang is explained; 4: it is not."""
        return {Kind.NO_HANG: 0, Kind.EXPLAINED: 3, Kind.UNEXPLAINED: 4}[self.kind]

    def to_json(self) -> dict[str, object]:
        """The same for programs, of what `json` can write."""
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
        }
