"""What programs ask an agent through its socket, and how it answers, in lines of JSON.

    -> {"ask": "status"}                         <- an AgentStatus
    -> {"ask": "look"}                           <- the same, and descriptors of the records
    -> {"ask": "stop", "why": "..."}             <- {}
    -> {"ask": "others"}                         <- Lines: what agents of other nodes find there
    -> {"ask": "others traced", "seconds": 5}    <- the same, of their calls for that long
    -> {"ask": "follow"}                         <- what happens, until it disconnects: following.py
    -> {"ask": "follow node"}                    <- the same, at this node only
                                                 <- {"error": "..."}

    program --"others"--> agent --AskOthers--> coordinator --AskNode--> each other agent
    program <---Line----- agent <--LineFor---- coordinator <--LineFor-- each, twice: when it is
                                                                        asked, and has inspected

Nothing blocks and nothing is kept for long. A program that does not read its answer is dropped when
others connect. It decides itself for how long it listens: on a busy machine an inspection may be
late. An agent that does not even answer at once is a stronger sign.
"""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.job_so_far import JobSoFar
from rallypoint.base.json_records import to_json
from rallypoint.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.launch.rounds.source import Roster, RoundSource

_MAX_REQUEST = 64 << 10
_MOST_AT_ONCE = 16
_MAX_UNSENT = 64 << 20
_MOST_ASKING = 16
UNKNOWN = "does not know that request"  # what agents of any version say


class RankStatus(Record, kw_only=True):
    """A worker of the latest round.

    Attributes:
        record_slot: where its flight record is, in units of FLIGHT_RECORD_BYTES.
        pid: its process; 0: not started yet.
        has_ended: then `code` or `signal` says how.
        by_launcher: the launcher asked it to end.
        error: its exception in a line, or why it could not be started.
        ended_at: when it ended, or reported the exception that is ending it, in seconds since the
            epoch.
    """

    rank: int
    local_rank: int
    record_slot: int
    has_ended: bool
    pid: int = 0
    code: int | None = None
    signal: str = ""
    by_launcher: bool = False
    error: str = ""
    ended_at: float = 0.0


class AgentStatus(Record, kw_only=True):
    """An agent and its workers.

    Attributes:
        phase: what the agent is doing, in node.py's terms; "paused": its workers are stopped
            until it hears the others again.
        round: the latest one here; -1: none yet.
        nodes, world_size: of that round.
        oom_kills: the number of out-of-memory kills since the job began, if known.
        loopback_trouble: why processes there do not reach each other; empty if they do.
        news: what the agent waits for while there is no round.
        so_far: what has happened, for the process that reads the node of node rank 0.
    """

    run_id: str
    host: str
    pid: int
    node_rank: int
    phase: str
    round: int
    nodes: int
    world_size: int
    uptime_s: float
    oom_kills: int | None
    loopback_trouble: str
    news: str
    workers: tuple[RankStatus, ...]
    so_far: JobSoFar | None = None

    @property
    def is_paused(self) -> bool:
        """Whether its workers are stopped until it hears the others again."""
        return self.phase == "paused"

    @property
    def running(self) -> tuple[RankStatus, ...]:
        """The workers that have not ended."""
        return tuple(each for each in self.workers if not each.has_ended)


class ExpectedNode(Record, kw_only=True):
    """A node that is to be inspected.

    Attributes:
        key: its agent's.
        silent_s: the time since its agent's last message.
        ranks: the first one there, and the one after its last.
        is_asking: the program that asks for the others runs there.
    """

    key: str
    node_rank: int
    host: str
    silent_s: float
    ranks: tuple[int, int]
    is_asking: bool


class Line(Record, kw_only=True):
    """A line for a program that has asked for the other nodes: one of these.

    Attributes:
        nodes: all nodes of the job; `why`: the reason why no node can be asked.
        coming: the key of an agent that is about to inspect its node.
        found: what an agent found at its node, as __main__.py writes it.
    """

    nodes: tuple[ExpectedNode, ...] | None = None
    why: str = ""
    coming: str = ""
    found: Mapping[str, object] | None = None


def expected_nodes(roster: Roster, asker: str) -> tuple[ExpectedNode, ...]:
    """The coordinator's roster, for a program at that agent."""
    nodes, first = [], 0
    for each in sorted(roster.members, key=lambda each: each.node_rank):
        nodes.append(
            ExpectedNode(
                key=each.key,
                node_rank=each.node_rank,
                host=each.host,
                silent_s=each.silent_s,
                ranks=(first, first + each.size),
                is_asking=each.key == asker,
            )
        )
        first += each.size
    return tuple(nodes)


class AskOthers(Record, kw_only=True):
    """To the coordinating agent: a program, whose request has that number, asks for all others."""

    number: int
    trace_s: float


class AskNode(Record, kw_only=True):
    """From the coordinating agent: inspect this node; `asker` is the agent that was asked."""

    number: int
    asker: str
    trace_s: float


class LineFor(Record, kw_only=True):
    """To `asker`, through the coordinating agent: an answer to the request of that number."""

    number: int
    asker: str
    line: Line


Inquiry = AskOthers | AskNode | LineFor
Reply = Callable[[Line], None]
Finding = Callable[[Mapping[str, object]], None]
Tell = Callable[[str], bool]  # a line for a program; whether it still listens


class Answers(Record, kw_only=True):
    """What an agent does when it is asked.

    Attributes:
        status: returns the agent's state.
        records: returns descriptors of its workers' records.
        stop: ends the job on all nodes; the reason is reported to the user.
        others: asks the other nodes, and replies whenever one has answered. They trace their
            workers for this many seconds; 0: they only inspect.
        follow: a program follows the job, or continues to; tells it a line whenever there is one.
        follow_node: the same; it needs only the lines of this node.
    """

    status: Callable[[], AgentStatus]
    records: Callable[[], Sequence[int]]
    stop: Callable[[str], None]
    others: Callable[[Reply, float], None]
    follow: Callable[[Tell], None]
    follow_node: Callable[[Tell], None]


class Conversations:
    """The programs that are connected now. Those that follow the job stay, whoever else asks."""

    def __init__(self, selector: selectors.BaseSelector, answers: Answers) -> None:
        self._selector = selector
        self._answers = answers
        self._open: list[_Conversation] = []

    def begin(self, connection: socket.socket) -> None:
        """A program has connected."""
        self._open = [each for each in self._open if each.is_open]
        brief = [each for each in self._open if not each.follows]
        if len(brief) >= _MOST_AT_ONCE:
            brief[0].close()
        self._open.append(_Conversation(connection, self._selector, self._answers))

    def close(self) -> None:
        """Drop them all."""
        for each in self._open:
            each.close()
        self._open.clear()


class _Conversation:
    """One request and its answer."""

    def __init__(
        self, connection: socket.socket, selector: selectors.BaseSelector, answers: Answers
    ) -> None:
        self.is_open = True
        self.follows = False
        self._connection = connection
        self._selector = selector
        self._answers = answers
        self._request = b""
        self._unsent = b""
        self._is_last = True  # the answer is one line
        self._waits_to_write = False
        selector.register(connection, selectors.EVENT_READ, self._read)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._connection)
            self._connection.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(_MAX_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._request += data
        if not data or len(self._request) > _MAX_REQUEST:
            self.close()
        elif self._request.endswith(b"\n"):
            self._answer()

    def _answer(self) -> None:
        try:  # who follows may have asked again before the first was read
            request = json.loads(self._request.strip().rpartition(b"\n")[2])
        except (ValueError, RecursionError):
            request = None
        self._request = b""
        if not isinstance(request, dict):
            return self._send({"error": "the request is not a JSON object"})
        try:
            self._perform(request)
        except Exception as error:  # no request may ever end a job
            self._send({"error": f"the agent could not answer: {error!r}"})
        return None

    def _perform(self, request: dict[str, object]) -> None:
        match request.get("ask"):
            case "status":
                self._send(to_json(self._answers.status()))
            case "look":
                self._send(to_json(self._answers.status()), self._answers.records())
            case "stop":
                self._answers.stop(str(request.get("why", ""))[:200])
                self._send({})
            case "others":
                self._is_last = False
                self._answers.others(self._send_line, 0.0)
            case "others traced":
                self._is_last = False
                self._answers.others(self._send_line, float(str(request["seconds"])))
            case "follow":
                self.follows, self._is_last = True, False
                self._answers.follow(self._tell)
            case "follow node":
                self.follows, self._is_last = True, False
                self._answers.follow_node(self._tell)
            case _:
                self._send({"error": f"this agent {UNKNOWN}; it may be an older version"})

    def _send_line(self, line: Line) -> None:
        self._send(to_json(line))

    def _tell(self, line: str) -> bool:
        """A line that a program may miss: it is left out if the program is behind."""
        if self.is_open and not self._unsent:
            self._unsent = line.encode() + b"\n"
            self._write()
        return self.is_open

    def _send(self, answer: object, descriptors: Sequence[int] = ()) -> None:
        if not self.is_open:
            return
        self._unsent += json.dumps(answer).encode() + b"\n"
        if len(self._unsent) > _MAX_UNSENT:
            return self.close()
        if not self._waits_to_write:
            self._write(descriptors)
        return None

    def _write(self, descriptors: Sequence[int] = ()) -> None:
        try:  # descriptors go with the first bytes
            sent = socket.send_fds(self._connection, [self._unsent], list(descriptors))
        except BlockingIOError:
            sent = 0
        except OSError:
            return self.close()
        self._unsent = self._unsent[sent:]
        if not self._unsent and self._is_last:
            return self.close()
        waits = bool(self._unsent)
        if waits is not self._waits_to_write:
            self._waits_to_write = waits
            events = selectors.EVENT_WRITE if waits else selectors.EVENT_READ
            self._selector.modify(self._connection, events, self._write if waits else self._read)
        return None


class Relay:
    """One agent's part in inspecting all nodes of a job.

    Args:
        inspect: inspects this node, or traces it for some seconds, and reports what it found.
    """

    def __init__(self, rounds: RoundSource, inspect: Callable[[Finding, float], None]) -> None:
        self._rounds = rounds
        self._inspect_node = inspect
        self._asking: dict[int, Reply] = {}  # programs here, by the number of their request
        self._last = 0

    def ask(self, reply: Reply, trace_s: float = 0.0) -> None:
        """A program asks for all other nodes; first reply: their names; then two for each."""
        roster = self._rounds.roster()
        if roster is None or not roster.leader:
            return reply(Line(nodes=(), why="" if roster is None else roster.why))
        self._last += 1
        self._asking[self._last] = reply
        self._asking.pop(self._last - _MOST_ASKING, None)
        request = AskOthers(number=self._last, trace_s=trace_s)
        if roster.leader == roster.me:
            return self._ask_all(roster.me, request)
        return self._say(roster.leader, request)

    def heard(self, sender: str, message: Inquiry) -> None:
        """Another agent asks, or answers."""
        match message:
            case AskOthers():
                self._ask_all(sender, message)
            case AskNode():
                self._inspect(message, lambda line: self._say(sender, line))
            case LineFor():
                self._pass_on(message)

    def _ask_all(self, asker: str, request: AskOthers) -> None:
        """This agent coordinates: name the others, and have each inspect its node."""
        roster = self._rounds.roster()
        if roster is None or roster.leader != roster.me:
            return
        nodes = expected_nodes(roster, asker)
        number = request.number
        self._pass_on(LineFor(number=number, asker=asker, line=Line(nodes=nodes)))
        order = AskNode(number=number, asker=asker, trace_s=request.trace_s)
        for node in nodes:
            if node.is_asking:
                continue
            if node.key == roster.me:
                self._inspect(order, self._pass_on)
            else:
                self._say(node.key, order)

    def _inspect(self, order: AskNode, say: Callable[[LineFor], None]) -> None:
        """Inspect this node."""

        def tell(line: Line) -> None:
            say(LineFor(number=order.number, asker=order.asker, line=line))

        tell(Line(coming=self._rounds.key))
        self._inspect_node(lambda found: tell(Line(found=found)), order.trace_s)

    def _pass_on(self, message: LineFor) -> None:
        """Forward to the agent whose program asked, or to the program here."""
        if message.asker != self._rounds.key:
            self._say(message.asker, message)
        elif message.number in self._asking:
            self._asking[message.number](message.line)

    def _say(self, to: str, message: Inquiry) -> None:
        from rallypoint.rendezvous.transport.codec import encode

        self._rounds.inquire(to, encode(message))
