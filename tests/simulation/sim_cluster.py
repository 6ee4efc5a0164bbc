"""A simulated cluster: the agents' real decisions, with simulated workers, clocks and network.

    cluster = SimCluster(seed=7, nodes=5, min_nodes=2, max_nodes=5)
    cluster.start_all(); cluster.run(10); cluster.kill("n2"); cluster.run(10)
    cluster.check_progress()

Each seed is one story. A violation of an invariant raises `ViolationError` at once
(sim_witness.py).
"""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.simulation.sim_agent import SimAgent
from tests.simulation.sim_clock import SimLoop
from tests.simulation.sim_keeper import SimKeeper
from tests.simulation.sim_network import SimNetwork
from tests.simulation.sim_witness import Witness

from rallypoint.rendezvous.consensus.messages import Setup
from rallypoint.rendezvous.consensus.participant import Part
from rallypoint.rendezvous.consensus.register import PeerRegister, Register
from rallypoint.rendezvous.consensus.rules import KEEPER, Rules
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.round import Endpoint, Member, Seat
from rallypoint.rendezvous.keyvalue.key_value_register import KeyValueRegister, KeyValueRules
from rallypoint.rendezvous.timeouts import Timeouts


class SimCluster:
    """The agents, the running workers, and the agreements."""

    def __init__(
        self,
        *,
        seed: int,
        nodes: int,
        min_nodes: int,
        max_nodes: int,
        endpoints: int = 1,
        max_restarts: int = 3,
        quorum: str = "members",
        rules: type[Rules] = Rules,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        wishes: tuple[int | None, ...] = (),
        names: tuple[str, ...] = (),
        keeper: type[SimKeeper] | None = None,
        is_fixed: bool = False,
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.other_random = Random(f"{seed} of kept workers")  # stories stay as they are
        self.rules = KeyValueRules if keeper and rules is Rules else rules
        self.loop = SimLoop()
        self.network = SimNetwork(self.loop, self.random)
        self.keeper = None if keeper is None else keeper(self.loop, self.random)
        self.kill_s, self.grace_s = timeouts.kill_s, 0.1
        self.works_for_s: float | None = None  # the time after which workers succeed
        self.agents: dict[str, SimAgent] = {}  # by name, the latest of each node
        self.witness = Witness(self.loop, f"seed {seed}")
        self.tell = self.witness.tell
        self.is_calm = False
        self.steady_keys = False  # a mutation for tests: a restarted agent keeps its old key
        self._names = names or tuple([f"n{i}" for i in range(nodes)])
        self._starts: Counter[str] = Counter()
        self._wishes = wishes
        self._common = {
            "run_id": "job",
            "limits": Limits(
                min_nodes=min_nodes,
                max_nodes=max_nodes,
                join_timeout_s=timeouts.join_timeout_s,
                last_call_s=timeouts.last_call_s,
                is_fixed=is_fixed,
            ),
            "endpoints": keeper.places
            if keeper
            else tuple([Endpoint(host=name, port=29400) for name in self._names[:endpoints]]),
            "max_restarts": max_restarts,
            "timeouts": timeouts,
            "quorum": quorum,
        }
        self._endpoints = 0 if keeper else endpoints
        self._late_endpoints = 0
        self._is_fixed = is_fixed

    def register(self, setup: Setup) -> Register:
        """One agent's register, by the rules of this cluster."""
        if issubclass(self.rules, KeyValueRules):
            return KeyValueRegister(setup, self.rules)
        return PeerRegister(setup, self.rules)

    # Queries and actions of a story.

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return self._names

    def is_alive(self, name: str) -> bool:
        """Whether an agent runs on that node."""
        return name in self.agents and self.agents[name].is_alive

    def leaders(self) -> list[str]:
        """The agents that believe they coordinate."""
        return [each.name for each in self.alive() if each.core.part is Part.LEADING]

    def start(self, name: str) -> SimAgent:
        """Start an agent on that node, or restart it."""
        self._starts[name] += 1
        if self.witness.newest is not None or self._starts[name] > 1:
            self._started_late(name)
        index = self._names.index(name)
        key = name if self.steady_keys else f"{name}.{self._starts[name]}"
        is_endpoint = index < self._endpoints
        me = Member(
            key=key,
            host=name,
            local_world_size=1 + index % 3,
            wish=self._wishes[index] if index < len(self._wishes) else None,
            address=name,
            port=29400 if is_endpoint else 20000 + self._starts[name],
        )
        slot = index if is_endpoint else None
        setup = Setup(me=me, slot=slot, **self._common)  # type: ignore[arg-type]
        agent = SimAgent(self, name, key, setup)
        self.agents[name] = agent
        self.network.attach(agent)
        self.tell(f"{name}: agent starts")
        agent.start()
        return agent

    def _started_late(self, name: str) -> None:
        """The promises of an endpoint's agent die with it, so that a second job may begin.

        This is documented: with three endpoints it takes two agents there that know of no job,
        restarted ones or such as have been cut off from the beginning, while no agent of the first
        job can be reached.
        """
        endpoints = self._names[: self._endpoints]
        if name not in endpoints or self._is_fixed:
            return
        self._late_endpoints += 1
        agents = [self.agents[each] for each in endpoints if each in self.agents]
        unaware = [each for each in agents if not each.core.job and self._starts[each.name] == 1]
        if self._late_endpoints + len(unaware) > (self._endpoints - 1) // 2:
            self.witness.may_fork = True

    def start_all(self, spread_s: float = 0.0) -> None:
        """Start all agents within that time."""
        for name in self._names:
            delay_s = self.random.uniform(0, spread_s) if spread_s else 0.0
            self.start_later(name, delay_s)

    def start_later(self, name: str, delay_s: float = 0.0) -> None:
        """Start an agent after the delay, if none runs there by then."""
        self.loop.after(delay_s, lambda: self.is_alive(name) or self.start(name))

    def run(self, seconds: float) -> None:
        """Let that much time pass."""
        self.loop.run(self.loop.now + seconds)

    def kill(self, name: str) -> None:
        """Kill the agent with SIGKILL; its guardian ends the workers."""
        agent = self.agents.get(name)
        if agent is not None and agent.is_alive:
            self.kill_agent(agent, "kill -9")

    def kill_agent(self, agent: SimAgent, how: str) -> None:
        """Kill this agent."""
        self.tell(f"{agent.name}: agent dies ({how})")
        self._bury(agent)

    def cut_later(self, groups: list[set[str]], delay_s: float) -> None:
        """Cut the network after the delay, if faults still happen by then."""

        def cut() -> None:
            if not self.is_calm:
                self.cut(groups)

        self.loop.after(delay_s, cut)

    def cut(self, groups: list[set[str]]) -> None:
        """Cut the network: only hosts in the same group reach each other."""
        self.tell(f"network: split into {' | '.join(' '.join(sorted(each)) for each in groups)}")
        if self.keeper is not None:
            self.keeper.cuts = {name for group in groups if KEEPER not in group for name in group}
        for group in groups:
            for other in groups:
                if group is not other:
                    self.network.cut(group, other)

    def deafen(self, name: str, names: set[str]) -> None:
        """Cut one direction: the node is still heard, but hears nobody."""
        self.tell(f"network: {name} hears nobody")
        self.network.cut(names, {name})

    def mend(self, *, is_lost: bool = False) -> None:
        """Repair all cables; messages sent meanwhile arrive, unless `is_lost`."""
        self.tell("network: whole again")
        self.network.mend(is_lost=is_lost)
        if self.keeper is not None:
            self.keeper.cuts, self.keeper.is_away = set(), False

    def divided(self) -> tuple[set[str], set[str]]:
        """The nodes that know the latest agreement, and those that do not."""
        newest = self.witness.newest
        know = {each.name for each in self.alive() if each.core.agreement == newest}
        return know, set(self._names) - know

    def calm(self) -> None:
        """Stop all faults from now on."""
        self.is_calm = True
        self.mend()
        self.network.calm()
        if self.keeper is not None:
            self.keeper.max_delay_s = min(self.keeper.max_delay_s, 0.05)
        self.witness.when_agreed = None
        for agent in self.alive():
            agent.dies_after = None

    # Calls from agents.

    def begun(self, agent: SimAgent, seat: Seat) -> None:
        """An agent's workers have started."""
        agent.job = agent.core.job
        self.witness.begun(agent.key, agent.name, agent.job, seat)
        if self.works_for_s is not None:
            self.succeed_later(agent, self.works_for_s)

    def succeed_later(self, agent: SimAgent, delay_s: float) -> None:
        """Let its workers succeed after the delay, if they still run."""
        seat = agent.seat

        def succeed() -> None:
            if agent.seat is seat:
                agent.succeed()

        self.loop.after(delay_s, succeed)

    def ended(self, agent: SimAgent, seat: Seat, *, how: str) -> None:
        """An agent's workers have succeeded, ended or are kept for another round."""
        self.witness.ended(agent.job, seat, succeeded=how == "succeeded")
        self.tell(f"{agent.name}: round {seat.number} {how}")

    def exited(self, agent: SimAgent) -> None:
        """An agent's process has ended by itself."""
        assert agent.finish is not None
        self.tell(f"{agent.name}: agent exits ({agent.finish.outcome.value})")
        if agent.keeper is not None:
            agent.keeper.close()
        self._bury(agent)

    def _bury(self, agent: SimAgent) -> None:
        agent.is_alive = False
        if agent.seat is not None:
            self.witness.ended(agent.job, agent.seat)
            agent.seat = None
        self.network.died(agent)

    # The invariants.

    def running(self) -> dict[str, int]:
        """The round that each node runs."""
        return {name: each.seat.number for name, each in self.agents.items() if each.seat}

    def alive(self) -> list[SimAgent]:
        """The agents that have not ended."""
        return [agent for agent in self.agents.values() if agent.is_alive]

    def check_running(self) -> None:
        """Check that all running workers belong to one round."""
        if len(set(self.running().values())) > 1 and not self.witness.may_fork:
            self.witness.violated(f"{self.running()} run at one time")

    def check_progress(self) -> None:
        """Check, after a long time without faults, that everything that can run is running."""
        stuck = self.stuck()
        if stuck:
            self.witness.violated(stuck)

    def stuck(self) -> str:
        """What has not become as it must without further faults."""
        alive, job = self.alive(), self.witness.newest
        limits = self._common["limits"]
        assert isinstance(limits, Limits)
        held = [
            each.core.agreement
            for each in alive
            if job is not None and each.core.register.may_claim() and each.core.job == job.host
        ]
        if self.witness.may_fork or not held:
            return self._jobs_apart(alive)
        # The latest agreement known to those that decide on the next one; others may know a later
        # one, but are not asked.
        newest = max([each for each in held if each], key=lambda each: each.number)
        if newest.finish is not None or (newest.host, newest.round) in self.witness.results:
            return ""
        keys = {KEEPER, *[agent.key for agent in alive]}
        for agent in alive:  # was something proposed that the live agents cannot decide on?
            pending = agent.core.register.voter.accepted
            if pending is None or pending.number <= newest.number:
                continue
            if not self.rules(agent.core.setup).is_quorum(pending, keys):
                return ""
        members = [each for each in newest.members if each.key in keys]
        rules = self.rules(alive[0].core.setup)
        running = self.running()
        if not rules.is_quorum(newest, keys):
            return f"{sorted(running)} run without a quorum" if running else ""
        # New agents find the job only at its endpoints.
        is_found = any(self.is_alive(name) for name in self._names[: self._endpoints])
        # A leaving agent stays a member until the next agreement; drivers wait for two seconds.
        leaving = {each.key for each in alive if each.core.follower.leaving}
        leaving &= {member.key for member in members}
        count = len(alive) if is_found or self.keeper is not None else len(members)
        count -= len(leaving)
        if count >= limits.min_nodes and (members or self.keeper is not None):
            places = {agent.seat.nodes for agent in alive if agent.seat}
            wanted = min(limits.max_nodes, count)
            least = min(wanted, limits.min_nodes) if self.works_for_s is not None else wanted
            if len(running) < least or places != {len(running)}:
                return f"only {sorted(running)} run, of {len(alive)}, and {wanted} could"
        return ""

    def _jobs_apart(self, alive: list[SimAgent]) -> str:
        """Two jobs of one name meet at the endpoints, and one of them gives way."""
        apart = {each.core.job: each.name for each in alive if each.core.leader_key == each.key}
        is_met = all(self.is_alive(name) for name in self._names[: self._endpoints])
        return (
            f"{sorted(apart.values())} coordinate a job each" if is_met and len(apart) > 1 else ""
        )
