"""Inspects the other nodes of a job over the agents' own connections.

    program --"others"--> agent --"others"--> coordinator --"look"--> each other agent
    program <---a line---- agent <------------ coordinator <--"coming"-- each, at once
    program <---a line---- agent <------------ coordinator <--"node"---- each, when it has looked

Nothing blocks and nothing is kept for long: the asking program decides how long it listens. The
coordinating agent first names the nodes to expect. On a busy machine an inspection may be late; an
agent that does not even answer at once is a stronger sign.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rallypoint.base.record import Record
from rallypoint.launch.inspection.requests import Reply
from rallypoint.launch.rounds.source import RoundSource

_MOST_ASKING = 16
Look = Callable[[Reply, float], None]


class LongWaits(Record):
    """A message to the coordinating agent: a worker of the sender's node waits for long, or did.

    Attributes:
        is_stopped: it does not wait, but a signal has stopped it.
    """

    round: int
    rank: int
    seconds: float
    is_over: bool
    is_stopped: bool = False

    def to_bytes(self) -> bytes:
        """As an inquiry."""
        told = {"ask": "wait", "number": self.rank, "round": self.round, "seconds": self.seconds}
        told |= {"is_over": self.is_over, "is_stopped": self.is_stopped}
        return json.dumps(told).encode()


class TimedOut(Record):
    """A message to the coordinating agent: `rank`, of the sender's node, waited for
    `culprit` in a call of `ranks` (empty: all) until its timeout.
    """

    round: int
    rank: int
    culprit: int
    ranks: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """As an inquiry."""
        told = {"ask": "timed out", "number": self.rank, "round": self.round}
        return json.dumps({**told, "culprit": self.culprit, "ranks": self.ranks}).encode()


class ContactLost(Record):
    """A message to the coordinating agent: `rank`, of the sender's node, cannot reach `culprit`.

    As control_message.LostContact.
    """

    round: int
    rank: int
    culprit: int
    had_formed: bool

    def to_bytes(self) -> bytes:
        """As an inquiry."""
        told = {"ask": "lost contact", "number": self.rank, "round": self.round}
        return json.dumps({**told, "culprit": self.culprit, "formed": self.had_formed}).encode()


class EndRank(Record):
    """A message from the coordinating agent: the node that has this rank is to kill it."""

    round: int
    rank: int
    because: str

    def to_bytes(self) -> bytes:
        """As an inquiry."""
        told = {"ask": "end rank", "number": self.rank, "round": self.round}
        return json.dumps({**told, "because": self.because}).encode()


Told = LongWaits | TimedOut | ContactLost | EndRank


class Relay:
    """One agent's part.

    Args:
        look: inspects this node, or traces it for some seconds, and replies with the findings.
        told: called with what another agent says of workers.
    """

    def __init__(
        self,
        rounds: RoundSource,
        look: Look,
        told: Callable[[Told], None] = lambda _: None,
    ) -> None:
        self._told = told
        self._rounds = rounds
        self._look = look
        self._asking: dict[int, Reply] = {}  # programs here, by the number of their request
        self._last = 0

    def ask(self, reply: Reply, *, trace_s: float = 0.0) -> None:
        """A program asks for all other nodes; first reply: their names; then one for each."""
        roster = self._rounds.roster()
        if roster is None or not roster.leader:
            return reply({"members": [], "why": "" if roster is None else roster.why})
        self._last += 1
        self._asking[self._last] = reply
        self._asking.pop(self._last - _MOST_ASKING, None)
        if roster.leader == roster.me:
            return self._ask_all(roster.me, self._last, trace_s)
        return self._say(roster.leader, ask="others", number=self._last, trace_s=trace_s)

    def end_rank(self, order: EndRank) -> None:
        """This agent coordinates: tell the others, one of which has that rank."""
        roster = self._rounds.roster()
        if roster is None or roster.leader != roster.me:
            return
        for each in roster.members:
            if each.key != roster.me:
                self._rounds.inquire(each.key, order.to_bytes())

    def heard(self, sender: str, payload: bytes) -> None:
        """Another agent asks, or answers; invalid messages are ignored."""
        try:
            message = json.loads(payload)
            if isinstance(message, dict) and isinstance(message.get("number"), int):
                self._take(sender, message)
        except Exception:  # no request may ever end a job
            return

    def _take(self, sender: str, message: dict[str, Any]) -> None:
        number, asker = message["number"], str(message.get("asker", ""))
        trace_s = float(message.get("trace_s", 0.0))
        match message.get("ask"):
            case "others":
                self._ask_all(sender, number, trace_s)
            case "look":
                roster = self._rounds.roster()
                key = "" if roster is None else roster.me
                self._say(sender, ask="coming", number=number, asker=asker, key=key)
                self._look(
                    lambda seen: self._say(sender, ask="node", number=number, asker=asker, **seen),
                    trace_s,
                )
            case "wait":
                waits = LongWaits(
                    int(message["round"]),
                    number,
                    float(message["seconds"]),
                    bool(message["is_over"]),
                    message.get("is_stopped") is True,
                )
                self._told(waits)
            case "timed out":
                ranks = tuple(map(int, message["ranks"]))
                culprit = int(message["culprit"])
                self._told(TimedOut(int(message["round"]), number, culprit, ranks))
            case "lost contact":
                culprit, had_formed = int(message["culprit"]), message["formed"] is True
                self._told(ContactLost(int(message["round"]), number, culprit, had_formed))
            case "end rank":
                roster = self._rounds.roster()
                if roster is not None and sender == roster.leader:
                    self._told(EndRank(int(message["round"]), number, str(message["because"])))
            case "node" | "members" | "coming":
                self._pass_on(asker, number, message)

    def _ask_all(self, asker: str, number: int, trace_s: float) -> None:
        """This agent coordinates: name the others, and have each inspect its node."""
        roster = self._rounds.roster()
        if roster is None or roster.leader != roster.me:
            return
        members, first = [], 0
        for each in sorted(roster.members, key=lambda each: each.node_rank):
            members.append(
                {
                    "key": each.key,
                    "node_rank": each.node_rank,
                    "host": each.host,
                    "silent_s": each.silent_s,
                    "ranks": [first, first + each.size],
                    "is_asking": each.key == asker,
                }
            )
            first += each.size
        self._pass_on(asker, number, {"ask": "members", "members": members, "why": ""})
        for each in roster.members:
            if each.key == asker:
                continue
            if each.key == roster.me:
                self._pass_on(asker, number, {"ask": "coming", "key": each.key})
                self._look(
                    lambda seen: self._pass_on(asker, number, {"ask": "node", **seen}), trace_s
                )
            else:
                self._say(each.key, ask="look", number=number, asker=asker, trace_s=trace_s)

    def _pass_on(self, asker: str, number: int, message: dict[str, object]) -> None:
        """Forward to the agent whose program asked."""
        roster = self._rounds.roster()
        if roster is not None and asker not in ("", roster.me):
            return self._say(asker, **{**message, "number": number, "asker": asker})
        reply = self._asking.get(number)
        if reply is not None:
            reply(message)
        return None

    def _say(self, to: str, /, **message: object) -> None:
        self._rounds.inquire(to, json.dumps(message).encode())
