"""The agent's answers to programs and other agents; imported at the first question.

It answers at once from what it knows and reads nothing: the asker gets the workers' process numbers
and the memory of their flight records, and inspects them itself. For other agents, a separate
process inspects this node.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rallypoint.base.address import loopback_trouble
from rallypoint.base.control_message import WorkerError
from rallypoint.base.errors import ControlMessageError
from rallypoint.launch.agent.agent_messages import AgentMessage, EndRank, read_message
from rallypoint.launch.agent.local_workers import LocalWorkers
from rallypoint.launch.agent.node import NodeState
from rallypoint.launch.agent.round_evidence import OomKills
from rallypoint.launch.inspection.child import Looker
from rallypoint.launch.inspection.requests import (
    AgentStatus,
    Answers,
    Conversations,
    Finding,
    RankStatus,
    Relay,
    Reply,
)
from rallypoint.launch.job import Job
from rallypoint.launch.rounds.source import RoundSource
from rallypoint.launch.worker_group import signal_name


class AgentAnswers(Answers):
    """Answers for one agent.

    Args:
        stop: ends the job.
        told: called with what another agent says of workers.
    """

    def __init__(
        self,
        job: Job,
        state: NodeState,
        rounds: RoundSource,
        workers: LocalWorkers,
        oom_kills: OomKills,
        selector: selectors.BaseSelector,
        *,
        began: float,
        stop: Callable[[str], None],
        told: Callable[[AgentMessage], None],
    ) -> None:
        self.conversations = Conversations(selector, self)
        self._looker = Looker(selector, self.conversations)
        self._tracer = Looker(selector, self.conversations)
        self._relay = Relay(rounds, self._look)
        self._told = told
        self._job, self._state, self._rounds = job, state, rounds
        self._began = began
        self._workers, self._oom_kills = workers, oom_kills
        self._stop = stop

    def close(self) -> None:
        """Drop all connections of askers."""
        self._looker.close()
        self._tracer.close()
        self.conversations.close()

    def heard(self, sender: str, payload: bytes) -> None:
        """Another agent asks, answers, or tells something; what is not a message is ignored."""
        try:
            message = read_message(payload)
        except ControlMessageError:
            return
        if not isinstance(message, AgentMessage):
            with suppress(Exception):  # no request may ever end a job
                self._relay.heard(sender, message)
        elif not isinstance(message, EndRank) or self._is_led_by(sender):
            self._told(message)

    def _is_led_by(self, key: str) -> bool:
        roster = self._rounds.roster()
        return roster is not None and roster.leader == key

    def status(self) -> AgentStatus:
        state, seat, pids = self._state, self._workers.seat, self._workers.pids
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
            workers=tuple(
                [
                    RankStatus(
                        rank=rank,
                        local_rank=local_rank,
                        has_ended=rank in state.group.exits,
                        **{"pid": pids.get(rank, 0), **self._end_of(rank)},
                    )
                    for rank, local_rank in state.group.local_ranks.items()
                ]
            ),
        )

    def records(self) -> Sequence[int]:
        evidence = self._workers.evidence
        return [] if evidence is None else evidence.records.descriptors

    def stop(self, why: str) -> None:
        self._stop(why)

    def others(self, reply: Reply, *, trace_s: float = 0.0) -> None:
        self._relay.ask(reply, trace_s=trace_s)

    def _look(self, reply: Finding, trace_s: float) -> None:
        if trace_s:
            self._tracer.look(reply, ("trace", str(trace_s)))
        else:
            self._looker.look(reply)

    def _end_of(self, rank: int) -> dict[str, Any]:
        group = self._state.group
        end, error = group.exits.get(rank), group.errors.get(rank)
        if end is None:
            return {} if error is None else {"error": _line_of(error), "ended_at": error.time_s}
        return {
            "pid": end.pid,
            "code": end.code,
            "signal": signal_name(end.signal) if end.signal else "",
            "by_launcher": end.by_launcher,
            "error": end.start_error or (_line_of(end.error) if end.error else ""),
            "ended_at": end.time_s,
        }


def _line_of(error: WorkerError) -> str:
    return f"{error.type}: {error.message}"[:300]
