"""A job that is followed, with chosen ranks late, stuck, dead or silent: what its nodes tell."""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.base.job_so_far import JobSoFar
from rallypoint.base.recorded_call import GroupCounts
from rallypoint.diagnosis.job_view import JobHistory, NodeHistory
from rallypoint.diagnosis.node_update import (
    GroupNames,
    GroupUpdate,
    NodeUpdate,
    RankUpdate,
    StepsUpdate,
)


@dataclass
class FollowedJob:
    """Ranks that do `calls` all_reduces of 4 MB in each step of `step_s`.

    Attributes:
        late_s: by rank, how much later it comes in each step than the others.
        stuck: since when that rank does not come any more, in seconds after the start.
        dead: ranks that were killed.
        states: of processes, by rank; others sleep.
        silent: when nodes have told something for the last time.
        steps: whether ranks tell their steps, of 50,000.
        so_far: what has happened, as node 0 tells; None: it does not.
    """

    ranks: int = 4
    nodes: int = 1
    step_s: float = 0.1
    calls: int = 4
    late_s: dict[int, float] = field(default_factory=dict)
    stuck: tuple[int, float] | None = None
    dead: tuple[int, ...] = ()
    states: dict[int, str] = field(default_factory=dict)
    silent: dict[int, float] = field(default_factory=dict)
    steps: bool = False
    host: str = "host{}"
    site: str = "/home/me/train.py:40"
    group: str = "default group"
    round: int = 0
    values: dict[str, str] = field(default_factory=dict)
    so_far: JobSoFar | None = None

    def history(self, now_s: float, count: int = 11) -> JobHistory:
        """What was told up to that time, each second."""
        nodes = []
        for node in range(self.nodes):
            last = min(now_s, self.silent.get(node, now_s))
            times = [last - before for before in range(count) if last - before > 0]
            updates = tuple(self.update(node, at_s) for at_s in reversed(times))
            nodes.append(
                NodeHistory(
                    node_rank=node,
                    host=self.host.format(node),
                    ranks=tuple(self._here(node)),
                    updates=updates,
                    age_s=now_s - last if updates else now_s,
                )
            )
        return JobHistory(nodes=tuple(nodes))

    def update(self, node: int, at_s: float) -> NodeUpdate:
        """What a node tells at that time."""
        return NodeUpdate(
            node_rank=node,
            host=self.host.format(node),
            now_ms=self._now_ms(node, at_s),
            uptime_ms=round(at_s * 1000),
            phase="running",
            news="",
            round=self.round,
            nodes=self.nodes,
            world_size=self.ranks,
            groups=(
                GroupNames(
                    name=self.group,
                    key="world",
                    members=f"0-{self.ranks - 1}",
                    backend="rallypoint",
                ),
            ),
            ranks=tuple(self._rank(rank, at_s) for rank in self._here(node)),
            steps=self._steps(at_s),
            so_far=self.so_far if node == 0 else None,
        )

    def _now_ms(self, node: int, at_s: float) -> int:
        """Each has its own clock."""
        return round((at_s + 1000 * (node + 1)) * 1000)

    def _steps(self, at_s: float) -> StepsUpdate | None:
        if not self.steps:
            return None
        step = self._step(at_s)
        return StepsUpdate(
            step=step,
            total=50_000,
            left_s=round((50_000 - step) * self.step_s),
            source="program",
            values=self.values,
        )

    def _step(self, at_s: float) -> int:
        worked_s = at_s if self.stuck is None else min(at_s, self.stuck[1])
        return int(worked_s / self.step_s)

    def _here(self, node: int) -> range:
        each = self.ranks // self.nodes
        return range(node * each, (node + 1) * each)

    def _rank(self, rank: int, at_s: float) -> RankUpdate:
        worked_s = at_s if self.stuck is None else min(at_s, self.stuck[1])
        steps = self._step(at_s)
        waits = max(self.late_s.values(), default=0.0) - self.late_s.get(rank, 0.0) + 0.0005
        stuck_s = at_s - worked_s
        is_stuck = self.stuck is not None and stuck_s > 0
        is_waiting = is_stuck and self.stuck is not None and rank != self.stuck[0]
        counts = GroupCounts(
            calls=steps * self.calls + is_waiting,
            transfers=0,
            bytes=(steps * self.calls) << 22,
            waited_ns=round(steps * waits * 1e9),
            waited_squared_ns2=round(steps * (waits * 1e9) ** 2),
            running_since_ns=round((worked_s + 1000) * 1e9) if is_waiting else 0,
        )
        is_dead = rank in self.dead
        return RankUpdate(
            rank=rank,
            pid=4000 + rank,
            state="" if is_dead else self.states.get(rank, "S"),
            end="killed by SIGKILL" if is_dead else "",
            cpu_ms=round(worked_s * 620),
            starved_ms=round(worked_s * (240 if rank in self.late_s else 10)),
            rss_kb=4_100_000,
            group=0,
            operation="all_reduce",
            number=counts.calls - 1,
            is_running=is_waiting,
            for_ms=round(stuck_s * 1000) if is_stuck else 29,
            site=self.site if is_waiting else "",
            counts=(GroupUpdate.of(0, counts, self._now_ms(0, at_s) * 1_000_000),),
            step=steps if self.steps else None,
            step_ms_ago=round((at_s - steps * self.step_s) * 1000) if self.steps else 0,
        )
