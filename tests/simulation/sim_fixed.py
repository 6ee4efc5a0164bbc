"""Simulated clusters whose nodes are known from the start, and random stories of them.

Invariants in addition to those of sim_witness.py: only node 0 coordinates, all rounds have the same
agents as the first, and node 0 begins no round when it knows that one of them is lost. In the end
every job must end.
"""

from __future__ import annotations

from random import Random

from tests.simulation.sim_agent import SimAgent
from tests.simulation.sim_cluster import SimCluster

from rallypoint.rendezvous.consensus.rules import FixedRules, Rules
from rallypoint.rendezvous.job.round import Seat
from rallypoint.rendezvous.timeouts import NO_SILENCE, Timeouts

TIMEOUTS = Timeouts(join_timeout_s=20.0, heartbeat_s=0.75, missed_heartbeats=NO_SILENCE)
BREAKS_AFTER_S = 6.0
_EVENTS = (
    *["kill", "kill node 0", "start", "start", "restart"],
    *["cut", "cut", "mend", "mend", "stop", "stop", "go on", "go on"],
    *["fail", "fail", "fail", "succeed", "end job"],
)
_GENTLE = (*["stop", "go on"] * 3, "fail", "fail", "succeed")
_FAULTS_S = 30.0
_END_S = 60.0  # by then, every job must have ended


class FixedCluster(SimCluster):
    """A simulated cluster with fixed nodes; node 0 is ``n0``."""

    def __init__(
        self,
        *,
        seed: int,
        nodes: int,
        rules: type[Rules] = FixedRules,
        timeouts: Timeouts = TIMEOUTS,
        quorum: str = "host",
        is_fixed: bool = True,
        breaks_after_s: float | None = BREAKS_AFTER_S,
        max_restarts: int = 3,
    ) -> None:
        super().__init__(
            seed=seed,
            nodes=nodes,
            min_nodes=nodes,
            max_nodes=nodes,
            rules=rules,
            timeouts=timeouts,
            quorum=quorum,
            is_fixed=is_fixed,
            max_restarts=max_restarts,
            wishes=tuple(range(nodes)),
        )
        self.network.breaks_after_s = breaks_after_s
        self._places: dict[str, dict[int, str]] = {}  # by job: the agent that has each rank

    def begun(self, agent: SimAgent, seat: Seat) -> None:
        """An agent's workers have started."""
        super().begun(agent, seat)
        places = self._places.setdefault(agent.job, {})
        if places.setdefault(seat.node_rank, agent.key) != agent.key:
            self.witness.violated(f"{agent.key} has the place of {places[seat.node_rank]}")
        if seat.nodes != len(self.names) or seat.node_rank != self.names.index(agent.name):
            self.witness.violated(f"{agent.key} is node {seat.node_rank} of {seat.nodes}")
        lost = agent.told_ended & set(places.values())
        if lost and agent.name == self.names[0]:
            self.witness.violated(f"node 0 begins round {seat.number} without {sorted(lost)}")

    def check_leader(self) -> None:
        """Check that only node 0 coordinates."""
        if not set(self.leaders()) <= {self.names[0]}:
            self.witness.violated(f"{self.leaders()} coordinate")

    def check_over(self) -> None:
        """Check that all agents have ended by themselves."""
        left = [agent.name for agent in self.alive()]
        if left:
            self.witness.violated(f"{left} have not ended")


def fixed_story(seed: int, **changes: object) -> FixedCluster:
    """Play one story to its end; `changes` alter the cluster's parameters, to test its assumptions.

    Raises:
        ViolationError: an invariant was violated; the message tells the story.
    """
    random = Random(f"static {seed}")
    nodes = random.choice([2, 2, 3, 5, 12])
    max_restarts = random.choice([0, 3, 1000])
    events = _GENTLE if random.random() < 0.3 else _EVENTS
    cluster = FixedCluster(seed=seed, nodes=nodes, max_restarts=max_restarts, **changes)  # type: ignore[arg-type]
    cluster.network.loss = random.choice([0.0, 0.0, 0.05])
    cluster.network.max_delay_s = random.choice([0.002, 0.02, 0.3])
    cluster.start_all(spread_s=random.choice([0.0, 2.0]))
    cluster.run(random.uniform(0.0, 6.0))
    end = cluster.loop.now + _FAULTS_S
    while cluster.loop.now < end:
        _befall(cluster, random, random.choice(events))
        cluster.run(random.choice([0.003, 0.05, 0.5, 2.0, 8.0]) * random.uniform(0.5, 1.5))
        cluster.check_leader()
    if random.random() < 0.5:  # otherwise the cut stays
        cluster.calm()
    for agent in cluster.alive():
        agent.go_on()
    cluster.works_for_s = 1.0
    for agent in cluster.alive():
        cluster.succeed_later(agent, random.uniform(0.0, 2.0))
    cluster.run(_END_S)
    cluster.check_leader()
    cluster.check_over()
    return cluster


def _befall(cluster: FixedCluster, random: Random, what: str) -> None:
    """Let one event happen."""
    names = list(cluster.names)
    name = random.choice(names)
    agent = cluster.agents.get(name)
    match what:
        case "kill":
            cluster.kill(name)
        case "kill node 0":
            cluster.kill(names[0])
        case "start":
            cluster.start_later(name)
        case "restart":
            if cluster.is_alive(name):
                cluster.kill(name)
                cluster.start_later(name, random.choice([0.0, 0.1, 1.0]))
        case "cut":
            some = set(random.sample(names, random.randint(1, len(names) - 1)))
            cluster.cut([some, set(names) - some])
        case "mend":
            cluster.mend()
        case "stop" if agent is not None:
            cluster.tell(f"{name}: SIGSTOP")
            agent.stop()
        case "go on" if agent is not None:
            cluster.tell(f"{name}: SIGCONT")
            agent.go_on()
        case "fail" if agent is not None:
            agent.fail()
        case "succeed" if agent is not None:
            cluster.succeed_later(agent, 0.0)
        case "end job" if agent is not None and random.random() < 0.3:
            agent.end_job()
