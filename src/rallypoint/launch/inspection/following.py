"""The agent's part in following a job: while a program follows it, a process on each node reads its
workers once a second, and each line that it writes reaches every program that follows.

    program --"follow"--> agent --Follow--> coordinator --FollowNode--> each agent --> its process
    program <---line----- agent <-ForAsker- coordinator <---FromNode--- each agent <--line--

A program asks again every few seconds (job_follower.py); that renews all the rest. Each step holds
for LEASE_S only, so what is lost with an agent, a coordinator or a round is there again after the
next request, and when the last program is gone, all of it ends. No agent has a timer for it, and
one whose job nobody follows does nothing. Lines may be lost: each one has all that it tells of.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rallypoint.base.json_records import to_json
from rallypoint.base.record import Record
from rallypoint.launch.inspection.child import spawn
from rallypoint.launch.inspection.requests import AgentStatus, Line, Tell, expected_nodes
from rallypoint.rendezvous.transport.codec import encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.launch.rounds.source import RoundSource

LEASE_S = 10.0  # what is not renewed for so long ends
RENEW_S = 3.0  # how often programs ask again
LOOK = b'{"ask": "look"}'
_MOST_FOLLOWING = 16  # programs at one agent
_ORDER_S = 2.0  # the coordinator's orders are at least this far apart, whoever asks
_CHUNK = 1 << 16
_MOST_OF_LINE = 1 << 20


class Follow(Record):
    """To the coordinating agent: programs of the sender follow the job."""


class FollowNode(Record):
    """From the coordinating agent: read this node's workers, and send it the lines."""


class FromNode(Record):
    """To the coordinating agent: what was read at a node."""

    line: str


class ForAsker(Record):
    """To an agent whose programs follow the job: a line for them."""

    line: str


FollowMessage = Follow | FollowNode | FromNode | ForAsker


class Following:
    """One agent's part.

    Args:
        start: starts the process that reads this node, given what to do with each line, and
            whether it is to go on.
    """

    def __init__(
        self,
        rounds: RoundSource,
        start: Callable[[Callable[[str], None], Callable[[], bool]], NodeProcess],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rounds, self._start, self._clock = rounds, start, clock
        self._process: NodeProcess | None = None
        self._programs: list[Tell] = []
        self._node_programs: list[Tell] = []  # they get this node's lines only
        self._read_until = 0.0
        self._coordinator, self._until = "", 0.0  # who wants this node's lines, and how long
        self._askers: dict[str, float] = {}  # as coordinator: agents with programs, and how long
        self._order_at = 0.0

    def ask(self, tell: Tell) -> None:
        """A program follows the job, or asks again."""
        if not self._add(tell, self._programs):
            return
        roster = self._rounds.roster()
        if roster is None or not roster.leader:
            tell(_nodes_line(Line(nodes=(), why="" if roster is None else roster.why)))
        elif roster.leader == roster.me:
            self._follow(roster.me)
        else:
            self._say((roster.leader,), Follow())

    def ask_node(self, tell: Tell) -> None:
        """A program follows this node only, or asks again: no other agent hears of it."""
        if self._add(tell, self._node_programs):
            tell(_nodes_line(Line(nodes=())))

    def heard(self, sender: str, message: FollowMessage) -> None:
        """Another agent asks, or has a line."""
        match message:
            case Follow():
                self._follow(sender)
            case FollowNode():
                self._coordinator, self._until = sender, self._clock() + LEASE_S
                self._read_node()
            case FromNode(line):
                self._pass_on(line, sender)
            case ForAsker(line):
                self._tell(line)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()

    def _add(self, tell: Tell, programs: list[Tell]) -> bool:
        """Have this node be read for a program; whether that is possible."""
        if tell not in programs:
            if len(self._programs) + len(self._node_programs) >= _MOST_FOLLOWING:
                text = f"{_MOST_FOLLOWING} programs follow this job here already; end one of them"
                tell(json.dumps({"error": text}))
                return False
            programs.append(tell)
        self._read_node()
        return True

    def _follow(self, asker: str) -> None:
        """This agent coordinates: tell the asker which nodes there are, and have all be read."""
        roster = self._rounds.roster()
        if roster is None or roster.leader != roster.me:
            return
        now = self._clock()
        self._askers = {key: until for key, until in self._askers.items() if now < until}
        self._askers[asker] = now + LEASE_S
        line = _nodes_line(Line(nodes=expected_nodes(roster, asker)))
        if asker == roster.me:
            self._tell(line)
        else:
            self._say((asker,), ForAsker(line))
        if now >= self._order_at:
            self._order_at = now + _ORDER_S
            self._say([each.key for each in roster.members if each.key != roster.me], FollowNode())
            self._read_node()

    def _read_node(self) -> None:
        """Have this node be read, for as long as that lasts by itself."""
        self._read_until = self._clock() + LEASE_S
        if self._process is None or self._process.is_over:
            with suppress(OSError):  # out of processes: the next request tries again
                self._process = self._start(self._read, lambda: self._clock() < self._read_until)

    def _read(self, line: str) -> None:
        """This node was read."""
        self._tell(line)
        self._node_programs = [tell for tell in self._node_programs if tell(line)]
        if self._clock() < self._until:
            self._say((self._coordinator,), FromNode(line))
        self._pass_on(line, self._rounds.key)

    def _pass_on(self, line: str, sender: str) -> None:
        """This agent coordinates: a node was read."""
        now = self._clock()
        askers = [key for key, until in self._askers.items() if now < until and key != sender]
        others = [key for key in askers if key != self._rounds.key]
        self._say(others, ForAsker(line))
        if len(others) < len(askers):
            self._tell(line)

    def _tell(self, line: str) -> None:
        self._programs = [tell for tell in self._programs if tell(line)]

    def _say(self, to: Sequence[str], message: FollowMessage) -> None:
        payload = encode(message) if to else b""
        for key in to:
            self._rounds.inquire(key, payload)


def _nodes_line(line: Line) -> str:
    return json.dumps(to_json(line), separators=(",", ":"))


class NodeProcess:
    """The process that reads this node (node_reader.py), started by its agent.

    Its lines are for those who follow the job, except for its request "look" (requests.py).

    Args:
        receive: called with each line.
        is_wanted: whether it is to go on.

    Attributes:
        is_over: it has ended.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        status: Callable[[], AgentStatus],
        records: Callable[[], Sequence[int]],
        receive: Callable[[str], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self.is_over = False
        self._selector, self._receive, self._is_wanted = selector, receive, is_wanted
        self._status, self._records = status, records
        self._data = b""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        try:
            self._pid = spawn(["follow"], stdin=theirs.fileno())
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        selector.register(self._socket, selectors.EVENT_READ, self._read)

    def close(self) -> None:
        """End it."""
        if not self.is_over:
            self.is_over = True
            self._selector.unregister(self._socket)
            self._socket.close()
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._data = (self._data + data).split(b"\n")
        if not data or len(self._data) > _MOST_OF_LINE or not self._is_wanted():
            return self.close()
        with suppress(Exception):  # nothing that was read may ever end a job
            for line in lines:
                if line != LOOK:
                    self._receive(line.decode("ascii"))
                else:
                    answer = json.dumps(to_json(self._status())).encode() + b"\n"
                    socket.send_fds(self._socket, [answer], list(self._records()))
        return None
