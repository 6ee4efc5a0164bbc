"""Rounds over agents' connections, for any coordinator: the common part of elastic and static jobs.

rendezvous/consensus/participant.py decides what to send and when to start and end workers; this
module has its connections and clock, and performs its orders. How the agents find each other, and
where a round's store is, differs: elastic.py, static_rounds.py.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from _thread import start_new_thread
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from math import inf
from random import SystemRandom

from rallypoint.base.address import numeric_family
from rallypoint.base.errors import ControlMessageError
from rallypoint.base.ready import earliest, left_until
from rallypoint.launch.output.terminal import say
from rallypoint.launch.rounds.source import AgentInfo, Roster, RoundSource
from rallypoint.rendezvous.consensus.messages import (
    Ack,
    Action,
    Call,
    Heartbeat,
    Message,
    OpenStore,
    SendMessage,
    Setup,
)
from rallypoint.rendezvous.consensus.participant import Part, Participant
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.job.reports import (
    Decision,
    Finish,
    Join,
    NodeReport,
    Notice,
    Outcome,
    Refuse,
    Start,
    Stop,
    assert_never,
)
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.transport.codec import OtherVersionError, decode, encode
from rallypoint.rendezvous.transport.link import TOKEN_REFUSED
from rallypoint.rendezvous.transport.peer_connections import PeerConnections, Receiver

GOODBYE_S = 2.0
_MOST_REFUSED = 8  # addresses that are reported
# An inquiry begins with it, and no message about rounds does.
_INQUIRY = b"?"
# Of the time that the others wait (kill_s): if we have not ended or paused the workers by then, the
# guardian does.
_GUARD_SHARE = 0.2
_FIRST_EXAMINATION_S = 1.0  # after the start: nodes that are started together have connected
_EXAMINE_BEFORE_S = 3.0  # giving up; it takes up to two seconds
CHECK_RESULT_S = 0.1  # for what was found


def lease_time() -> float:
    """The clock of leases: seconds since the machine was started, while it is suspended as well.

    The guardian uses the same clock, so leases that expired meanwhile end workers on waking.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LinkedRounds(RoundSource, Receiver):
    """One agent's part in a job of several nodes.

    Args:
        register: creates this agent's end of what the job agrees on.
        listener: where others call this agent; owned by this object. None: it only calls.
        stalled_s, lost_s: see PeerConnections.
        is_verbose: print the reason of each decision.
        speak: prints a message for the user.
    """

    def __init__(
        self,
        setup: Setup,
        register: Callable[[Setup], Register],
        listener: socket.socket | None,
        token: bytes,
        *,
        stalled_s: float,
        lost_s: float | None = None,
        is_verbose: bool = False,
        speak: Callable[[str], None] = say,
    ) -> None:
        super().__init__(setup.me.key)
        self._setup = setup
        self._register = register
        self._core = self._new_core()
        # Of the core, as of its last event: each turn of the agent's loop asks for both.
        self._core_wakes_at: float | None = None
        self._core_fence_at: float | None = None
        self._connections = PeerConnections(
            setup.me.key, token, listener, self, stalled_s=stalled_s, lost_s=lost_s
        )
        self._is_verbose = is_verbose
        self._say = speak
        self._part = Part.SEEKING
        self._events: deque[Callable[[float], Decision[Action]]] = deque()
        self._is_busy = False
        self._finish: Finish | None = None
        self._encoded: tuple[Message | None, bytes] = (None, b"")
        self.to_find_out = ""  # see Job
        # Addresses of agents without the job's token, and keys of agents of another version.
        self._refused: set[str] = set()
        self._findings: list[str] = []  # the first one: what keeps this node from the others
        self._start_findings: list[str] | None = None  # the same at the start; None: not looked for
        self._examine_at = self._last_examination_at = inf

    # How the kinds differ.

    @abstractmethod
    def _open_store(self, number: int, members: tuple[Member, ...]) -> Endpoint:
        """An empty store for the workers of these members in that round."""

    def _send(self, to: str, at: Endpoint | None, message: Message) -> None:
        self._connections.send(to, at, self._bytes_of(message))

    def _call(self, at: Endpoint, message: Message) -> None:
        self._connections.call(at, self._bytes_of(message))

    def _joined_late(self, key: str, join: Join) -> None:
        """An agent asks to join a job that is over for this node."""

    def _not_found(self, at: Endpoint, why: str) -> None:
        self._happened(lambda now: self._core.unreachable(at, why, now))

    def _name_of(self, at: Endpoint) -> str:
        return f"the agent at {at}"

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Let it register its sources of events."""
        selector.register(self._connections, selectors.EVENT_READ, self._connections.poll)

    # RoundSource.

    @property
    def wake_at(self) -> float | None:
        examine_at = self._examine_at if self._examine_at < inf else None
        core_wakes_at = self._core_wakes_at
        if core_wakes_at is not None:
            core_wakes_at += time.monotonic() - lease_time()
        return earliest(examine_at, self._connections.wake_at, core_wakes_at)

    @property
    def fence_at(self) -> float | None:
        fence_at = self._core_fence_at
        return None if fence_at is None else fence_at + _GUARD_SHARE * self._setup.timeouts.kill_s

    def open(self, selector: selectors.BaseSelector) -> None:
        self._watch(selector)
        wait_s, now = self._setup.timeouts.join_timeout_s, time.monotonic()
        self._last_examination_at = now + max(wait_s - _EXAMINE_BEFORE_S, wait_s / 2)
        self._examine_at = min(now + _FIRST_EXAMINATION_S, self._last_examination_at)
        self._begin()

    def tell(self, report: NodeReport) -> None:
        self._happened(lambda now: self._core.reported(report, now))

    def tick(self) -> None:
        self._examine_if_due()
        self._connections.poll()
        self._happened(self._core.tick)

    def roster(self) -> Roster:
        core, now = self._core, lease_time()
        members = [
            AgentInfo(member.key, member.node_rank, member.host, member.size, silent_s)
            for member, silent_s in core.led_members(now)
        ]
        return Roster(me=self.key, leader=core.leader_key, members=tuple(members), why=self.news)

    def inquire(self, key: str, payload: bytes) -> None:
        self._connections.send(key, None, _INQUIRY + payload)

    def fenced(self) -> None:
        self._happened(self._core.fenced)

    def close(self) -> None:
        """See RoundSource. A leaving node waits until the others agree to it."""
        deadline = time.monotonic() + GOODBYE_S
        is_leaving = bool(self._core.follower.leaving)
        with selectors.DefaultSelector() as selector:
            self._watch(selector)
            while is_leaving and self._core.part is not Part.DONE and time.monotonic() < deadline:
                selector.select(left_until(earliest(self.wake_at, deadline)))
                self.tick()
        self._connections.close(GOODBYE_S)

    # Receiver.

    def heard(self, key: str, payload: bytes) -> None:
        if payload[:1] == _INQUIRY:
            if self.inquired is not None:
                self.inquired(key, payload[1:])
            return
        try:
            message = decode(payload)
        except OtherVersionError as error:
            self._heard_other_version(key, is_refusal=error.is_refusal)
            return
        except ControlMessageError as error:
            self._say(f"agent {key}: {error}")
            return
        claimed = key
        if isinstance(message, Heartbeat):
            claimed = message.key
        elif isinstance(message, Join):
            claimed = message.member.key
        if claimed != key:
            self._say(
                f"agent {key} sent a message in the name of another agent, {claimed}; ignored it."
            )
        elif not isinstance(message, Join) or self._may_join(key, message):
            self._received(key, message)

    def _heard_other_version(self, key: str, *, is_refusal: bool) -> None:
        """Refuse it, once. If it refuses this node, which has no job yet, this node ends."""
        cure = "install the same version on all nodes"
        address = self._connections.address_of(key)
        if is_refusal:
            why = f"the agent at {address} runs another version of rallypoint; {cure}"
            self._received(key, Refuse(self.key, why))
        elif key not in self._refused and len(self._refused) < _MOST_REFUSED:
            self._refused.add(key)
            self._say(
                f"refused a node from {address}: it runs another version of rallypoint; {cure}."
            )
            self._connections.send(key, None, encode(Refuse(key, "its version is another one")))

    def _received(self, key: str, message: Message) -> None:
        self._happened(lambda now: self._core.received(key, message, now))

    def _may_join(self, key: str, join: Join) -> bool:
        """Whether it may join; otherwise it gets the reason."""
        address = join.member.address
        if join.member.port and numeric_family(address) is None:
            wrong = f"its address {address!r} is not numeric; check --local-addr"
            self._connections.send(key, None, encode(Refuse(key, wrong)))
            return False
        if self._finish is not None:
            self._joined_late(key, join)
        return self._finish is None

    def gone(self, key: str, why: str) -> None:
        self._happened(lambda now: self._core.closed(key, why, now))

    def failed(self, address: str, what: str) -> None:
        self._say(f"the agent at {address}: {what}.")

    def refused(self, address: str) -> None:
        if address in self._refused or len(self._refused) >= _MOST_REFUSED:
            return
        self._refused.add(address)
        self._say(
            f"refused a node from {address}: it has another token, or none; set the same"
            " RALLYPOINT_TOKEN, or --token-file, on all nodes."
        )

    def unreachable(self, at: Endpoint, why: str) -> None:
        if why == TOKEN_REFUSED and not self._core.job:
            because = f"{self._name_of(at)} refused this node: {why}"
            self.orders.append(Finish(outcome=Outcome.GIVEN_UP, because=because, was_cut_off=True))
            return
        self._not_found(at, why)

    # The core.

    def _new_core(self) -> Participant:
        return Participant(self._register(self._setup), SystemRandom())

    def _begin(self) -> None:
        """Look for the others."""
        self._happened(self._core.started)

    def _happened(self, event: Callable[[float], Decision[Action]]) -> None:
        """Pass it an event. Events during its actions are handled afterwards."""
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._events:
                self._perform(self._events.popleft()(lease_time()))
        finally:
            self._is_busy = False
            self._core_wakes_at, self._core_fence_at = self._core.wake_at, self._core.fence_at

    def _perform(self, decision: Decision[Action]) -> None:
        self._report(decision.reason)
        for action in decision.actions:
            match action:
                case SendMessage(to=to, at=at, message=message):
                    self._send(to, at, message)
                case Call(at=at, message=message):
                    self._call(at, message)
                case OpenStore(round=number, members=members):
                    self._provide_store(number, members)
                case Start():
                    self.news = ""
                    self.orders.append(action)
                case Stop():
                    self.orders.append(action)
                case Finish():
                    self._finish = action
                    self.orders.append(self._with_finding(action))
                case Notice(text):
                    self.news = text
                    self._say(text)
                case _:
                    assert_never(action)

    def _with_finding(self, finish: Finish) -> Finish:
        """If the nodes never connected: add what this node finds out about the cause."""
        has_met = finish.was_cut_off or self._core.follower.last_round >= 0
        if finish.outcome is not Outcome.GIVEN_UP or has_met or self._setup.limits.max_nodes == 1:
            return finish
        from rallypoint.doctor.quick import told_with

        if not self._findings:
            self._findings.append(_found(self._examine))
        return finish.__replace__(because=told_with(finish.because, self._findings[0]))

    def _examine_if_due(self) -> None:
        """Look for the cause at the start, and shortly before giving up: the others still run."""
        now = time.monotonic()
        if now < self._examine_at:
            return
        if self._core.follower.last_round >= 0 or self._setup.limits.max_nodes == 1:
            self._examine_at = inf
        elif now >= self._last_examination_at:
            self._examine_at = inf
            _run_in_thread(self._examine, self._findings)
        elif self._start_findings is None:
            self._examine_at = now + CHECK_RESULT_S
            self._start_findings = []
            _run_in_thread(self._examine_start, self._start_findings)
        elif self._is_examining_start:
            self._examine_at = now + CHECK_RESULT_S
        else:
            self._examine_at = self._last_examination_at
            if finding := self._start_findings[0]:
                self._say(f"not all nodes have connected yet: {finding}; {self.to_find_out}")

    @property
    def _is_examining_start(self) -> bool:
        return self._start_findings == []

    def _examine_start(self) -> str:
        from rallypoint.doctor.quick import first_finding

        return first_finding(
            [(each.host, each.port) for each in self._setup.endpoints if each.port],
            os.environ,
            count=self._setup.limits.max_nodes,
            is_listener=self._setup.slot is not None,
        )

    def _examine(self) -> str:
        from rallypoint.doctor.cluster_facts import MEETING
        from rallypoint.doctor.quick import finding_about

        agent = self._agent_to_examine()
        looked_at = self._setup.endpoints if agent is None else (agent,)
        return finding_about(
            [(each.host, each.port) for each in looked_at if each.port],
            os.environ,
            count=self._setup.limits.max_nodes,
            role=MEETING if agent is None else "where the first node's agent listens",
        )

    def _agent_to_examine(self) -> Endpoint | None:
        """The agent found at the endpoint that does not answer; None: the endpoint does not."""
        return None

    def _provide_store(self, number: int, members: tuple[Member, ...]) -> None:
        endpoint = self._open_store(number, members)
        self._happened(lambda now: self._core.store_opened(number, endpoint, now))

    def _bytes_of(self, message: Message) -> bytes:
        """A message to many is encoded once; answers differ."""
        if isinstance(message, Ack):
            return encode(message)
        if message is not self._encoded[0]:
            self._encoded = (message, encode(message))
        return self._encoded[1]

    def _report(self, reason: str) -> None:
        """Report a new or lost coordinator to the user; the rest only if verbose."""
        before, self._part = self._part, self._core.part
        is_known = self._core.follower.last_round >= 0 and self._part is not Part.DONE
        has_changed = before is not self._part and (
            self._part in (Part.LEADING, Part.CAMPAIGNING) or before is Part.LEADING
        )
        if reason and (self._is_verbose or (is_known and has_changed)):
            self._say(f"{self._part.value}: {reason}" if self._is_verbose else reason)


def _run_in_thread(examine: Callable[[], str], findings: list[str]) -> None:
    """Append what it finds to those."""
    start_new_thread(lambda: findings.append(_found(examine)), ())


def _found(examine: Callable[[], str]) -> str:
    """What it finds; nothing where that fails, as on a machine that has no threads left."""
    try:
        return examine()
    except Exception:  # what is examined is reported anyway
        return ""
