"""An agent's report of itself and its workers, read from its answer (agent/answers.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.base.errors import HostError
from rallypoint.launch.inspection.agent_client import ask
from rallypoint.launch.inspection.entries import Found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """A worker of the latest round.

    Attributes:
        pid: its process; 0: not started yet.
        has_ended: then `code` or `signal` says how.
        by_launcher: the launcher asked it to end.
        error: its exception in a line, or why it could not be started.
        ended_at: when it ended, or reported the exception that is ending it, in seconds since the
            epoch.
    """

    rank: int
    local_rank: int
    pid: int = 0
    has_ended: bool = False
    code: int | None = None
    signal: str = ""
    by_launcher: bool = False
    error: str = ""
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """An agent and its workers.

    Attributes:
        phase: what the agent is doing, in node.py's terms; "paused": its workers are stopped
            until it hears the others again.
        round: the latest one here; -1: none yet.
        nodes, world_size: of that round.
        oom_kills: the number of out-of-memory kills since the job began, if known.
        loopback_trouble: why processes there do not reach each other; empty if they do.
        news: what the agent waits for while there is no round.
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
    ranks: tuple[RankStatus, ...] = field(default=())

    @property
    def is_paused(self) -> bool:
        """See `phase`."""
        return self.phase == "paused"

    @property
    def running(self) -> tuple[RankStatus, ...]:
        """The workers that have not ended."""
        return tuple(each for each in self.ranks if not each.has_ended)


def ask_status(agent: Found, *, timeout_s: float = 2.0) -> AgentStatus:
    """Ask an agent for its status.

    Raises:
        NoAnswerError: it does not answer.
        HostError: its answer is invalid.
    """
    return read_status(ask(agent, {"ask": "status"}, timeout_s=timeout_s))


def read_status(told: Mapping[str, object]) -> AgentStatus:
    """Read an answer.

    Raises:
        HostError: it is invalid.
    """
    try:
        ranks = told["ranks"]
        assert isinstance(ranks, list)
        return AgentStatus(
            run_id=str(told["run_id"]),
            host=str(told["host"]),
            pid=_whole(told["pid"]),
            node_rank=_whole(told["node_rank"]),
            phase=str(told["phase"]),
            round=_whole(told["round"]),
            nodes=_whole(told["nodes"]),
            world_size=_whole(told["world_size"]),
            uptime_s=float(str(told["uptime_s"])),
            oom_kills=None if told["oom_kills"] is None else _whole(told["oom_kills"]),
            loopback_trouble=str(told["loopback_trouble"]),
            news=str(told["news"]),
            ranks=tuple(_read_rank(each) for each in ranks),
        )
    except (KeyError, TypeError, ValueError, AssertionError, AttributeError):
        raise HostError(
            "the agent's answer is invalid; the agent may run another version of rallypoint."
        ) from None


def _read_rank(told: Mapping[str, object]) -> RankStatus:
    code = told.get("code")
    return RankStatus(
        rank=_whole(told["rank"]),
        local_rank=_whole(told["local_rank"]),
        pid=_whole(told["pid"]),
        has_ended="code" in told,
        code=None if code is None else _whole(code),
        signal=str(told.get("signal", "")),
        by_launcher=bool(told.get("by_launcher")),
        error=str(told.get("error", "")),
        ended_at=float(str(told.get("ended_at", 0))),
    )


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError
    return value
