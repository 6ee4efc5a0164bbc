"""An observer of a simulated cluster, which knows more than any agent, and records the story.

It raises `ViolationError` when two agents hold different agreements with one number, when workers
of two rounds run at the same time, when members differ on the membership, when a rank changes
without need, and when a restart is charged although nothing failed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from typing import NoReturn

from tests.simulation.sim_clock import SimLoop

from rallypoint.rendezvous.consensus.messages import Agreement
from rallypoint.rendezvous.consensus.participant import Participant
from rallypoint.rendezvous.job.round import Member, Seat

_SHOWN = 400  # the number of lines shown of a story
_LINE = re.compile(r"^ *([0-9.]+)  (\S+)(?: \w+)?: (.*?)(?:, node \d+ of \d+)?$")


class ViolationError(AssertionError):
    """An invariant was violated."""


class Witness:
    """The agreements and running workers of all jobs with the same name.

    Attributes:
        lines: the events, with their times.
        agreed: agreements by job, which is identified by the agent that began it, and by number.
        newest: the agreement with the highest number.
        failures: the rounds with a failed worker.
        results: the jobs and rounds in which some workers have succeeded: newcomers wait.
        may_fork: whether a second job with the same name may have begun; see SimCluster.
        when_agreed: called once at the next agreement.
    """

    def __init__(self, loop: SimLoop, title: str) -> None:
        self.lines: list[str] = []
        self.agreed: dict[str, dict[int, Agreement]] = {}
        self.newest: Agreement | None = None
        self.failures: set[int] = set()
        self.results: set[tuple[str, int]] = set()
        self.may_fork = False
        self.when_agreed: Callable[[], object] | None = None
        self._loop, self._title = loop, title
        self._held: dict[str, Agreement] = {}  # by agent
        self._begun: dict[tuple[str, int], dict[int, str]] = {}  # by job and round: ranks
        self._running: Counter[tuple[str, int]] = Counter()

    # The story.

    def tell(self, text: str) -> None:
        """Record a line."""
        self.lines.append(f"{self._loop.now:9.3f}  {text}")

    def violated(self, what: str) -> NoReturn:
        """Raise an error with the whole story.

        Raises:
            ViolationError: always.
        """
        told = "\n".join([*_shortened(self.lines)[-_SHOWN:], f"{self._loop.now:9.3f}  !! {what}"])
        raise ViolationError(f"{self._title}:\n{told}")

    # Agreements.

    def look_at(self, key: str, agent: Participant) -> None:
        """Compare what this agent holds with everything that any agent ever held."""
        decided = agent.agreement
        if decided is None or decided is self._held.get(key) or decided.number < 0:
            return
        self._held[key] = decided
        job = self.agreed.setdefault(decided.host, {})
        known = job.setdefault(decided.number, decided)
        if known is decided:
            if decided.number == max(job):
                self.newest = decided
            self._check_follow_up(job, decided)
            act, self.when_agreed = self.when_agreed, None
            if act is not None:
                act()
        elif known != decided:
            text = f"{key} holds another agreement {decided.number}: {_text(decided)}"
            self.violated(f"{text}, not {_text(known)}")

    def before_newest(self) -> tuple[Member, ...]:
        """The members that decided on the latest agreement."""
        newest = self.newest
        before = newest and self.agreed[newest.host].get(newest.number - 1)
        return before.members if before else ()

    def _check_follow_up(self, job: dict[int, Agreement], new: Agreement) -> None:
        if new.restarts > len(self.failures):
            self.violated(f"{new.restarts} restarts are charged for {len(self.failures)} failures")
        if not new.runs:
            return
        # A round that was agreed on may not have started anywhere, which a new coordinator cannot
        # know: ranks are unchanged since that round, or since the one that ran before it.
        ran: dict[str, int] = {}
        agreed: list[tuple[str, int]] = []
        for old in sorted(job.values(), key=lambda each: each.number):
            if old.runs and old.number < new.number:
                ranks = {member.key: member.node_rank for member in old.members}
                has_begun = (old.host, old.round) in self._begun
                ran, agreed = (ranks, []) if has_begun else (ran, [*agreed, *ranks.items()])
            stay = {member.key for member in old.members}
            ran = {key: rank for key, rank in ran.items() if key in stay}
        wished = {member.wish for member in new.members if member.wish is not None}
        for member in new.members:
            rank = ran.get(member.key, -1)
            is_free = 0 <= rank < len(new.members) and rank not in wished
            stays = member.node_rank == rank or (member.key, member.node_rank) in agreed
            if is_free and member.wish is None and not stays:
                self.violated(f"{member.host} had rank {rank}, and has {member.node_rank}")

    # Workers.

    def begun(self, key: str, name: str, job: str, seat: Seat) -> None:
        """An agent has started workers."""
        this = (job, seat.number)
        self._running[this] += 1
        others = [
            each[1]
            for each, count in self._running.items()
            if count and each != this and (each[0] == job or not self.may_fork)
        ]
        self.tell(f"{name}: round {seat.number} begins, node {seat.node_rank} of {seat.nodes}")
        if others:
            self.violated(f"round {seat.number} begins while round {others[0]} still runs")
        ranks = self._begun.setdefault(this, {-1: str(seat.nodes)})
        if ranks.setdefault(seat.node_rank, key) != key or ranks[-1] != str(seat.nodes):
            self.violated(f"round {seat.number} is not the same for all")

    def ended(self, job: str, seat: Seat, *, succeeded: bool = False) -> None:
        """An agent's workers have ended."""
        self._running[job, seat.number] -= 1
        if succeeded:
            self.results.add((job, seat.number))


def _text(agreement: Agreement) -> str:
    hosts = " ".join(member.key for member in agreement.members)
    kind = f"round {agreement.round}" if agreement.runs else "no round"
    return f"{kind} of {hosts}"


def _shortened(lines: list[str]) -> list[str]:
    """Shorten a story: one line for many agents that do or say the same."""
    short: list[str] = []
    for what, group in groupby(lines, key=_what):
        several = list(group)
        found = [match for match in map(_LINE.match, several) if match]
        if len(several) == 1 or not found:
            short += several
        else:
            names = " ".join(match.group(2) for match in found)
            short.append(f"{found[0].group(1):>9}  {names}: {what}")
    return short


def _what(line: str) -> str:
    match = _LINE.match(line)
    return match.group(3) if match else ""
