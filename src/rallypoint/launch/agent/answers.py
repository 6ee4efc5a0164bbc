"""The agent's answers to programs and other agents; imported at the first question.

It answers at once from what it knows and reads nothing: the asker gets the workers' process numbers
and the memory of their flight records, and inspects them itself. For other agents, a separate
process inspects this node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rallypoint.base.address import loopback_trouble
from rallypoint.base.control_message import WorkerError
from rallypoint.base.errors import ControlMessageError
from rallypoint.base.job_so_far import NEWEST
from rallypoint.launch.agent.complaints import AgentMessage, EndRank
from rallypoint.launch.agent.final_reports import OomKills
from rallypoint.launch.agent.local_workers import AgentParts
from rallypoint.launch.inspection.child import NodeInspector
from rallypoint.launch.inspection.following import Following, FollowMessage, NodeProcess
from rallypoint.launch.inspection.requests import (
    AgentStatus,
    Answers,
    Conversations,
    Finding,
    Inquiry,
    RankStatus,
    Relay,
)
from rallypoint.launch.worker_group import signal_name
from rallypoint.rendezvous.transport.codec import decode_any

_MESSAGES = {kind.__name__: kind for kind in (AgentMessage | Inquiry | FollowMessage).__args__}


class AgentAnswers:
    """Answers for one agent.

    Args:
        stop: ends the job.
        reported: called with what another agent reports of workers.
    """

    def __init__(
        self,
        parts: AgentParts,
        oom_kills: OomKills,
        *,
        began: float,
        stop: Callable[[str], None],
        reported: Callable[[AgentMessage], None],
    ) -> None:
        self._relay = Relay(parts.rounds, self._inspect)
        self._following = Following(
            parts.rounds,
            lambda *how: NodeProcess(parts.selector, self._status_with_events, self._records, *how),
        )
        answers = Answers(
            status=self._status,
            records=self._records,
            stop=stop,
            others=self._relay.ask,
            follow=self._following.ask,
            follow_node=self._following.ask_node,
        )
        self.conversations = Conversations(parts.selector, answers)
        self._inspector = NodeInspector(parts.selector, self.conversations)
        self._tracer = NodeInspector(parts.selector, self.conversations)
        self._job, self._state, self._rounds = parts.job, parts.state, parts.rounds
        self._workers, self._oom_kills, self._began = parts.workers, oom_kills, began
        self._progress = parts.progress
        self._reported = reported

    def close(self) -> None:
        """Drop all connections of askers."""
        self._inspector.close()
        self._tracer.close()
        self._following.close()
        self.conversations.close()

    def heard(self, sender: str, payload: bytes) -> None:
        """Another agent asks, answers, or reports something; what is not a message is ignored."""
        try:
            message = read_message(payload)
        except ControlMessageError:
            return
        if not isinstance(message, AgentMessage):
            with suppress(Exception):  # no request may ever end a job
                if isinstance(message, FollowMessage):
                    self._following.heard(sender, message)
                else:
                    self._relay.heard(sender, message)
        elif not isinstance(message, EndRank) or self._is_led_by(sender):
            self._reported(message)

    def _is_led_by(self, key: str) -> bool:
        roster = self._rounds.roster()
        return roster is not None and roster.leader == key

    def _status(self) -> AgentStatus:
        state, seat = self._state, self._workers.seat
        return AgentStatus(
            run_id=self._job.run_id,
            host=self._job.host,
            pid=os.getpid(),
            node_rank=state.node_rank,
            phase="paused" if state.is_paused else state.phase.value,
            round=state.round,
            nodes=seat.nodes if seat is not None else 0,
            world_size=self._workers.world_size,
            uptime_s=time.monotonic() - self._began,
            oom_kills=self._oom_kills.new,
            loopback_trouble=loopback_trouble("127.0.0.1"),
            news=self._rounds.news,
            workers=tuple(map(self._rank_status, state.group.local_ranks)),
        )

    def _status_with_events(self) -> AgentStatus:
        if self._state.node_rank != 0:
            return self._status()  # node rank 0 tells of the job
        return self._status().__replace__(so_far=self._progress.events.so_far(NEWEST))

    def _records(self) -> Sequence[int]:
        evidence = self._workers.evidence
        return [] if evidence is None else evidence.records.descriptors

    def _inspect(self, reply: Finding, trace_s: float) -> None:
        if trace_s:
            self._tracer.inspect(reply, ("trace", str(trace_s)))
        else:
            self._inspector.inspect(reply)

    def _rank_status(self, rank: int) -> RankStatus:
        group, worker = self._state.group, self._workers.by_rank.get(rank)
        end, error = group.exits.get(rank), group.errors.get(rank)
        status = RankStatus(
            rank=rank,
            local_rank=group.local_ranks[rank],
            record_slot=group.local_ranks[rank] if worker is None else worker.record_slot,
            has_ended=end is not None,
            pid=0 if worker is None else worker.pid,
            error=_line_of(error) if error else "",
            ended_at=error.time_s if error else 0.0,
        )
        if end is None:
            return status
        return status.__replace__(
            pid=end.pid,
            code=end.code,
            signal=signal_name(end.signal) if end.signal else "",
            by_launcher=end.by_launcher,
            error=end.start_error or (_line_of(end.error) if end.error else ""),
            ended_at=end.time_s,
        )


def read_message(payload: bytes) -> AgentMessage | Inquiry | FollowMessage:
    """Read what another agent has sent."""
    message: AgentMessage | Inquiry | FollowMessage = decode_any(_MESSAGES, payload)
    return message


def _line_of(error: WorkerError) -> str:
    return f"{error.type}: {error.message}"[:300]
