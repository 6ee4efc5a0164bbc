"""Decides for the whole job: when a round begins, when it must stop, and what comes after it.

    GATHERING --all nodes are here--> RUNNING --a failure, a stop, all ended--> STOPPING
        ^                                                      --all nodes ended--> DONE
        \\--restart, resize-------------------------------------------/

What agents report and `now` go in; orders to all agents and their reason come out. One agent, that
of node 0, runs this for all; a job of one machine runs it too. No socket, clock or process here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from rallypoint.base.record import Record
from rallypoint.launch.round import Member, Round

NOTICE_EVERY_S = 10.0


# What agents report.


class Cause(Record, kw_only=True):
    """One worker's failure, in a line."""

    rank: int
    node_rank: int
    text: str
    time_s: float
    is_echo: bool = False
    is_startup: bool = False


class Broken(Record, kw_only=True):
    """A worker of this node failed: the round cannot succeed any more."""

    node_rank: int
    round: int
    text: str


class Ended(Record, kw_only=True):
    """Nothing of the round is left running on this node, but for what cannot be killed."""

    node_rank: int
    round: int
    succeeded: bool
    causes: tuple[Cause, ...] = ()
    unkillable: int = 0


class StopAsked(Record, kw_only=True):
    """A signal asked this node's agent to stop the job."""

    node_rank: int
    text: str


Report = Broken | Ended | StopAsked


# What they are told.


class Outcome(Enum):
    """How a job ends."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


class Start(Record, kw_only=True):
    """Start the workers of this round; `because` says why there is a new one."""

    round: Round
    because: str = ""


class Stop(Record, kw_only=True):
    """End the workers of this round."""

    round: int
    because: str


class Finish(Record, kw_only=True):
    """The job is over. `what` went wrong first is told in full by the node `culprit`, if any."""

    outcome: Outcome
    because: str
    culprit: int | None = None
    what: str = ""


Order = Start | Stop | Finish


class OpenRound(Record, kw_only=True):
    """Open an empty worker store, and order all members to start."""

    number: int
    members: tuple[Member, ...]
    because: str


class Notice(Record):
    """Tell the user why nothing happens."""

    text: str


Action = OpenRound | Stop | Finish | Notice


class Decision(Record):
    """What to do now, and why; without a reason, nothing has changed."""

    actions: tuple[Action, ...] = ()
    reason: str = ""


NOTHING = Decision()


# The policy.


class Next(Enum):
    """What comes after a round."""

    SUCCEED = "succeed"
    RESTART = "restart"
    RESIZE = "resize"
    STOP = "stop"
    GIVE_UP = "give up"


class RoundEnd(Record, kw_only=True):
    """All that counts when a round is over on every node that is still there."""

    succeeded: bool = False
    causes: tuple[Cause, ...] = ()
    restarts_used: int = 0
    max_restarts: int = 0
    stop_asked: str = ""
    nodes_left: int = 1
    nodes_lost: tuple[int, ...] = ()
    min_nodes: int = 1
    unkillable: int = 0

    @property
    def root(self) -> Cause | None:
        """Who failed first: the earliest that is no echo, if there is one."""
        return min(self.causes, key=lambda cause: (cause.is_echo, cause.time_s), default=None)


class Verdict(Record):
    """What comes next, and why."""

    next: Next
    reason: str


def judge(end: RoundEnd) -> Verdict:  # noqa: PLR0911 - one line for each rule
    """What comes after this round."""
    root = end.root
    left = end.max_restarts - end.restarts_used
    if end.succeeded:
        return Verdict(Next.SUCCEED, "every worker succeeded")
    if end.unkillable:
        return Verdict(Next.GIVE_UP, "what cannot be killed may still use what a new round needs")
    if end.stop_asked and not (root is not None and left <= 0):
        return Verdict(Next.STOP, end.stop_asked)
    if end.nodes_lost and end.nodes_left < end.min_nodes:
        return Verdict(
            Next.GIVE_UP,
            f"{_nodes(end.nodes_lost)} lost, {end.nodes_left} left, {end.min_nodes} needed",
        )
    if end.nodes_lost:  # a lost node is no failure of the program, and its echoes are none either
        return Verdict(Next.RESIZE, f"{_nodes(end.nodes_lost)} lost; the others go on")
    if root is None:
        return Verdict(Next.GIVE_UP, "its workers ended, and nobody knows why")
    if root.is_startup:
        return Verdict(
            Next.GIVE_UP, "it failed before its own work began, so another try would end the same"
        )
    if left > 0:
        return Verdict(Next.RESTART, f"restart {end.restarts_used + 1} of {end.max_restarts}")
    if end.max_restarts:
        return Verdict(Next.GIVE_UP, f"all {end.max_restarts} restarts are used up")
    return Verdict(Next.GIVE_UP, "no restarts are allowed; --max-restarts allows them")


def _nodes(ranks: Sequence[int]) -> str:
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# The machine.


class Stage(Enum):
    """Where the job stands."""

    GATHERING = "gathering"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


_MOVES: dict[Stage, tuple[Stage, ...]] = {
    Stage.GATHERING: (Stage.RUNNING, Stage.DONE),
    Stage.RUNNING: (Stage.STOPPING, Stage.GATHERING, Stage.DONE),
    Stage.STOPPING: (Stage.GATHERING, Stage.DONE),
    Stage.DONE: (),
}


class _Node:
    def __init__(self, member: Member) -> None:
        self.member = member
        self.ended: Ended | None = None
        self.is_gone = False


class Coordinator:
    """The job. Each method takes one event and gives one `Decision`.

    `nodes` are there from the start to the end: with static members, one that is lost ends the job.
    """

    def __init__(self, nodes: int, max_restarts: int, join_timeout_s: float = 600.0) -> None:
        self.nodes = nodes
        self.max_restarts = max_restarts
        self.join_timeout_s = join_timeout_s
        self.stage = Stage.GATHERING
        self.round = -1
        self.restarts = 0
        self.wake_at: float | None = None
        self.stop_asked = ""
        self.lost: list[int] = []
        self._members: dict[int, _Node] = {}
        self._deadline = 0.0

    def opened(self, now: float) -> Decision:
        """Nodes may join from now on."""
        self._deadline = now + self.join_timeout_s
        self.wake_at = min(now + NOTICE_EVERY_S, self._deadline)
        return NOTHING

    def joined(self, member: Member) -> Decision:
        """A node's agent is here."""
        if self.stage is not Stage.GATHERING or member.node_rank in self._members:
            return NOTHING
        self._members[member.node_rank] = _Node(member)
        if len(self._members) < self.nodes:
            return NOTHING
        return self._open("", f"all {self.nodes} nodes are here")

    def reported(self, report: Report) -> Decision:
        """A member's agent reports."""
        match report:
            case Broken(round=self.round):
                return self._stop(report.text)
            case StopAsked():
                self.stop_asked = self.stop_asked or report.text
                if self.stage is Stage.GATHERING:
                    return self._finish(Outcome.STOPPED, report.text)
                return self._stop(report.text)
            case Ended(round=self.round) if self._expects(report.node_rank):
                self._members[report.node_rank].ended = report
                stopped = NOTHING if report.succeeded else self._stop(_first_words(report))
                judged = self._judge_if_all_ended()
                reasons = [text for text in (stopped.reason, judged.reason) if text]
                return Decision(stopped.actions + judged.actions, "; ".join(reasons))
        return NOTHING

    def node_lost(self, node_rank: int, why: str) -> Decision:
        """A member's agent is gone, and its workers with it."""
        node = self._members.get(node_rank)
        if self.stage is Stage.DONE or node is None:
            return NOTHING
        if node.ended is not None and node.ended.succeeded:
            node.is_gone = True  # its work is done: it is only missed if there is another round
            return Decision((), f"node {node_rank} left after its workers had succeeded: {why}")
        del self._members[node_rank]
        if self.stage is Stage.GATHERING:
            return Decision((), f"node {node_rank} left before the start: {why}")
        self.lost.append(node_rank)
        stopped = self._stop(f"node {node_rank} was lost: {why}")
        judged = self._judge_if_all_ended()
        return Decision(stopped.actions + judged.actions, stopped.reason or judged.reason)

    def tick(self, now: float) -> Decision:
        """Time has passed."""
        if self.stage is not Stage.GATHERING or self.wake_at is None or now < self.wake_at:
            return NOTHING
        text = f"{len(self._members)}/{self.nodes} nodes joined; missing {self._missing()}"
        if now >= self._deadline:
            waited = (
                f"{text}, after {self.join_timeout_s:g} s; start it there, or look why it ended"
            )
            return self._finish(Outcome.GIVEN_UP, waited)
        self.wake_at = min(now + NOTICE_EVERY_S, self._deadline)
        return Decision((Notice(text),), "")

    def _missing(self) -> str:
        absent = [rank for rank in range(self.nodes) if rank not in self._members]
        shown = ", ".join(map(str, absent[:16]))
        return f"node-rank {shown}" + (", ..." if len(absent) > 16 else "")

    def _expects(self, node_rank: int) -> bool:
        return self.stage in (Stage.RUNNING, Stage.STOPPING) and node_rank in self._members

    def _judge_if_all_ended(self) -> Decision:
        ends = [node.ended for node in self._members.values()]
        if not all(ends):
            return NOTHING
        gone = [rank for rank, node in self._members.items() if node.is_gone]
        causes = tuple(cause for end in ends if end for cause in end.causes)
        facts = RoundEnd(
            succeeded=not self.lost and all(end.succeeded for end in ends if end),
            causes=causes,
            restarts_used=self.restarts,
            max_restarts=self.max_restarts,
            stop_asked=self.stop_asked,
            nodes_left=len(self._members) - len(gone),
            nodes_lost=tuple(sorted(self.lost + gone)),
            min_nodes=self.nodes,
            unkillable=sum(end.unkillable for end in ends if end),
        )
        verdict = judge(facts)
        match verdict.next:
            case Next.SUCCEED:
                return self._finish(Outcome.SUCCEEDED, verdict.reason)
            case Next.STOP:
                return self._finish(Outcome.STOPPED, verdict.reason)
            case Next.GIVE_UP:
                return self._finish(Outcome.GIVEN_UP, verdict.reason, facts.root)
            case Next.RESTART:
                self.restarts += 1
        self._move(Stage.GATHERING)
        return self._open(verdict.reason, verdict.reason)

    def _open(self, because: str, reason: str) -> Decision:
        self._move(Stage.RUNNING)
        self.wake_at = None
        self.round += 1
        for node in self._members.values():
            node.ended = None
        members = tuple(self._members[rank].member for rank in sorted(self._members))
        return Decision((OpenRound(number=self.round, members=members, because=because),), reason)

    def _stop(self, because: str) -> Decision:
        if self.stage is not Stage.RUNNING:
            return NOTHING
        self._move(Stage.STOPPING)
        return Decision((Stop(round=self.round, because=because),), because)

    def _finish(self, outcome: Outcome, because: str, root: Cause | None = None) -> Decision:
        self._move(Stage.DONE)
        self.wake_at = None
        culprit = root.node_rank if root else None
        what = root.text if root else ""
        finish = Finish(outcome=outcome, because=because, culprit=culprit, what=what)
        return Decision((finish,), because)

    def _move(self, to: Stage) -> None:
        if to not in _MOVES[self.stage]:
            raise RuntimeError(f"a job cannot go from {self.stage.value} to {to.value}")
        self.stage = to


def _first_words(end: Ended) -> str:
    return end.causes[0].text if end.causes else f"node {end.node_rank} ended early"
