"""Follows a job from a program on one of its machines: what all its nodes tell, once a second.

The program's renewals keep all of it going (following.py), so when it ends, however it ends, so
does the reading on all nodes.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rallypoint.base.errors import ControlMessageError, HostError
from rallypoint.base.json_records import from_json
from rallypoint.diagnosis.job_view import JobHistory, NodeHistory
from rallypoint.diagnosis.node_update import NodeUpdate, from_line
from rallypoint.launch.inspection.agent_client import AgentConnection, NoAnswerError
from rallypoint.launch.inspection.entries import Found, running_agents
from rallypoint.launch.inspection.following import RENEW_S
from rallypoint.launch.inspection.requests import UNKNOWN, ExpectedNode, Line

_KEPT = 11  # updates of a node: ten seconds
START_S = 2.0  # what a node may take to begin
_AGAIN_S = 1.0  # after an agent was lost, until it is looked for again
_TOO_OLD = (
    "its launcher is older than this rallypoint, and cannot be followed; use `rallypoint status` of"
    " its version."
)

Wait = Callable[[Sequence[int], float], object]


def _until_next_second(_descriptors: Sequence[int], _timeout_s: float) -> None:
    time.sleep(1.0)


def follow(agents: Sequence[Found], wait: Wait = _until_next_second) -> Iterator[JobHistory]:
    """What has been told of a job so far, whenever `wait` returns, until the job is over.

    Args:
        agents: those of the job on this machine.
        wait: waits until one of these descriptors can be read, or for that many seconds, or for
            less.

    Raises:
        HostError: no agent answers, or none can be followed.
    """
    with JobFollower(agents) as follower:
        while not follower.is_over:
            yield follower.history()
            wait(follower.descriptors, max(0.0, follower.wake_at - time.monotonic()))
            follower.poll()


class JobFollower:
    """A program's connections to agents of the job on this machine: one that knows the others, or
    else all.

    Args:
        only_here: the nodes on other machines are not followed.

    Attributes:
        is_over: no agent of the job runs here any more.
        wake_at: when to `poll` at the latest, by the monotonic clock.
    """

    def __init__(self, agents: Sequence[Found], *, only_here: bool = False) -> None:
        self.is_over = False
        self._request: dict[str, object] = {"ask": "follow node" if only_here else "follow"}
        self._job = agents[0].job
        self._connections: dict[int, AgentConnection] = {}  # by process
        self._began = time.monotonic()
        self._expected: tuple[ExpectedNode, ...] = ()
        self._why = ""
        self._is_alone = (
            only_here  # the agent names no others: those on this machine are asked, too
        )
        self._nodes: dict[int, deque[tuple[float, NodeUpdate]]] = {}
        self._connect(agents)
        self._renew()

    def __enter__(self) -> JobFollower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Follow the job no more."""
        for each in self._connections.values():
            each.close()

    @property
    def descriptors(self) -> list[int]:
        """They can be read when something was told."""
        return [each.fileno() for each in self._connections.values()]

    def poll(self) -> None:
        """Take what was told, and renew what is due. Errors are those of `follow`."""
        now = time.monotonic()
        for pid, connection in tuple(self._connections.items()):
            try:
                if select.select([connection], [], [], 0)[0]:
                    for line in connection.lines(now):
                        self._told(line)
            except HostError as error:
                if UNKNOWN not in str(error):
                    raise
                raise HostError(_TOO_OLD) from None
            if connection.has_ended:
                connection.close()
                del self._connections[pid]
        if now >= self.wake_at:
            self._renew()

    def history(self) -> JobHistory:
        """What is known now."""
        now = time.monotonic()
        # Before the first round nodes have no rank.
        expected = {each.node_rank: each for each in self._expected if each.node_rank >= 0}
        nodes = []
        for node_rank in sorted(expected or self._nodes):
            told = self._nodes.get(node_rank, ())
            at = told[-1][0] if told else min(now, self._began + START_S)
            if told:
                host, ranks = told[-1][1].host, tuple(each.rank for each in told[-1][1].ranks)
            else:
                node = expected[node_rank]
                host, ranks = node.host, tuple(range(*node.ranks))
            nodes.append(
                NodeHistory(
                    node_rank=node_rank,
                    host=host,
                    ranks=ranks,
                    updates=tuple(update for _, update in told),
                    age_s=now - at,
                )
            )
        return JobHistory(nodes=tuple(nodes), why=self._why)

    def _connect(self, agents: Sequence[Found]) -> None:
        """Connect to the first that answers; to all, if they do not know each other."""
        errors = []
        for agent in agents:
            if self._connections and not self._is_alone:
                return
            try:
                if agent.pid not in self._connections:
                    self._connections[agent.pid] = AgentConnection.at(agent)
            except HostError as error:
                errors.append(error)
        if errors and not self._connections:
            raise errors[0]

    def _renew(self) -> None:
        """Ask again, or another agent."""
        self.wake_at = time.monotonic() + RENEW_S
        if not self._connections or self._is_alone:
            agents = [each for each in running_agents() if each.job == self._job]
            self.is_over = not agents
            if not self._connections:
                self.wake_at = time.monotonic() + _AGAIN_S
            try:
                self._connect(agents)
            except NoAnswerError:
                return
        for connection in self._connections.values():
            try:
                connection.send(self._request)
            except NoAnswerError:
                connection.has_ended = True

    def _told(self, line: dict[str, object]) -> None:
        update = from_line(line)
        if update is None:
            try:
                told = from_json(Line, line)
            except ControlMessageError:
                return  # of a newer version
            if told.nodes is not None:
                self._expected, self._why = told.nodes, told.why
                self._is_alone = not (told.nodes or told.why)
            return
        kept = self._nodes.setdefault(update.node_rank, deque(maxlen=_KEPT))
        if kept and (update.round, update.now_ms) == (kept[-1][1].round, kept[-1][1].now_ms):
            return  # it came by two ways
        kept.append((time.monotonic(), update))
