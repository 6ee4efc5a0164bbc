"""A simulated cluster: the agents' own decisions, with simulated workers, clocks and network.

    cluster = SimCluster(seed=7, nodes=5, min_nodes=2, max_nodes=5)
    cluster.start_all(); cluster.run(10); cluster.kill("n2"); cluster.run(10)
    cluster.check_progress()

One seed is one story. What must never happen raises `ViolationError` at once (sim_witness.py).
"""

from __future__ import annotations

from collections import Counter
from random import Random

from rallypoint.rendezvous.consensus.messages import Setup
from rallypoint.rendezvous.consensus.participant import Part
from rallypoint.rendezvous.consensus.peer_register import PeerRegister
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.consensus.rules import KEEPER, Rules
from rallypoint.rendezvous.job.membership import Limits
from rallypoint.rendezvous.job.round import Endpoint, Member, Seat
from rallypoint.rendezvous.keyvalue.register import KeyValueRegister
from rallypoint.rendezvous.keyvalue.rules import KeyValueRules
from rallypoint.rendezvous.timeouts import Timeouts
from rallypoint.testing.sim_agent import SimAgent
from rallypoint.testing.sim_clock import SimLoop
from rallypoint.testing.sim_keeper import SimKeeper
from rallypoint.testing.sim_network import SimNetwork
from rallypoint.testing.sim_witness import Witness


class SimCluster:
    """Agents, what runs, and what has been agreed."""

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
        self.rules = KeyValueRules if keeper and rules is Rules else rules
        self.loop = SimLoop()
        self.network = SimNetwork(self.loop, self.random)
        self.keeper = None if keeper is None else keeper(self.loop, self.random)
        self.kill_s, self.grace_s = 1.0, 0.1
        self.works_for_s: float | None = None  # after which workers succeed
        self.agents: dict[str, SimAgent] = {}  # the newest of each node, by name
        self.witness = Witness(self.loop, f"seed {seed}")
        self.tell = self.witness.tell
        self.is_calm = False
        self.steady_keys = False  # a mutation: an agent that is started again has its old key
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
            "kill_s": self.kill_s,
        }
        self._endpoints = 0 if keeper else endpoints
        self._late_endpoints = 0
        self._is_fixed = is_fixed

    def register(self, setup: Setup) -> Register:
        """One agent's, by the rules of this cluster."""
        if issubclass(self.rules, KeyValueRules):
            return KeyValueRegister(setup, self.rules)
        return PeerRegister(setup, self.rules)

    # What a story asks and does.

    @property
    def names(self) -> tuple[str, ...]:
        """All nodes."""
        return self._names

    def is_alive(self, name: str) -> bool:
        """Whether an agent runs on that node."""
        return name in self.agents and self.agents[name].is_alive

    def leaders(self) -> list[str]:
        """Who believes to coordinate."""
        return [each.name for each in self.alive() if each.core.part is Part.LEADING]

    def start(self, name: str) -> SimAgent:
        """An agent is started on that node, anew if it ran before."""
        self._starts[name] += 1
        is_late = self.witness.newest is not None or self._starts[name] > 1
        self._late_endpoints += is_late and name in self._names[: self._endpoints]
        # What an endpoint's agent promised dies with it. Documented; with three endpoints it takes
        # two that are started again while none of the first job can be reached.
        too_many = (self._endpoints - 1) // 2
        self.witness.may_fork = (
            self.keeper is None and not self._is_fixed and self._late_endpoints > too_many
        )
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

    def start_all(self, spread_s: float = 0.0) -> None:
        """All agents, within that time."""
        for name in self._names:
            delay_s = self.random.uniform(0, spread_s) if spread_s else 0.0
            self.start_later(name, delay_s)

    def start_later(self, name: str, delay_s: float = 0.0) -> None:
        """Then, if none runs there."""
        self.loop.after(delay_s, lambda: self.is_alive(name) or self.start(name))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.loop.run(self.loop.now + seconds)

    def kill(self, name: str) -> None:
        """kill -9 of the agent; its guardian ends the workers."""
        agent = self.agents.get(name)
        if agent is not None and agent.is_alive:
            self.kill_agent(agent, "kill -9")

    def kill_agent(self, agent: SimAgent, how: str) -> None:
        """That one is dead."""
        self.tell(f"{agent.name}: agent dies ({how})")
        self._bury(agent)

    def cut_later(self, groups: list[set[str]], delay_s: float) -> None:
        """Then, if things still happen."""

        def cut() -> None:
            if not self.is_calm:
                self.cut(groups)

        self.loop.after(delay_s, cut)

    def cut(self, groups: list[set[str]]) -> None:
        """Only who is in one group reaches each other."""
        self.tell(f"network: split into {' | '.join(' '.join(sorted(each)) for each in groups)}")
        if self.keeper is not None:
            self.keeper.cuts = {name for group in groups if KEEPER not in group for name in group}
        for group in groups:
            for other in groups:
                if group is not other:
                    self.network.cut(group, other)

    def deafen(self, name: str, names: set[str]) -> None:
        """It is still heard, but hears nobody."""
        self.tell(f"network: {name} hears nobody")
        self.network.cut(names, {name})

    def mend(self, *, is_lost: bool = False) -> None:
        """No cable is cut any more; what was sent meanwhile comes, unless it is lost."""
        self.tell("network: whole again")
        self.network.mend(is_lost=is_lost)
        if self.keeper is not None:
            self.keeper.cuts, self.keeper.is_away = set(), False

    def divided(self) -> tuple[set[str], set[str]]:
        """Who knows the newest agreement, and who does not."""
        newest = self.witness.newest
        know = {each.name for each in self.alive() if each.core.agreement == newest}
        return know, set(self._names) - know

    def calm(self) -> None:
        """Nothing happens from now on."""
        self.is_calm = True
        self.mend()
        self.network.calm()
        if self.keeper is not None:
            self.keeper.max_delay_s = min(self.keeper.max_delay_s, 0.05)
        self.witness.when_agreed = None
        for agent in self.alive():
            agent.dies_after = None

    # What agents do.

    def begun(self, agent: SimAgent, seat: Seat) -> None:
        """Workers run."""
        agent.job = agent.core.job
        self.witness.begun(agent.key, agent.name, agent.job, seat)
        if self.works_for_s is not None:
            self.succeed_later(agent, self.works_for_s)

    def succeed_later(self, agent: SimAgent, delay_s: float) -> None:
        """Its workers succeed then, if they still run."""
        seat = agent.seat

        def succeed() -> None:
            if agent.seat is seat:
                agent.succeed()

        self.loop.after(delay_s, succeed)

    def ended(self, agent: SimAgent, seat: Seat, *, succeeded: bool) -> None:
        """They run no more."""
        self.witness.ended(agent.job, seat, succeeded=succeeded)
        how = "succeeded" if succeeded else "ended"
        self.tell(f"{agent.name}: round {seat.number} {how}")

    def exited(self, agent: SimAgent) -> None:
        """An agent's process ends by itself."""
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

    # What must hold.

    def running(self) -> dict[str, int]:
        """Which node runs which round."""
        return {name: each.seat.number for name, each in self.agents.items() if each.seat}

    def alive(self) -> list[SimAgent]:
        """The agents that have not ended."""
        return [agent for agent in self.agents.values() if agent.is_alive]

    def check_running(self) -> None:
        """What runs is one round."""
        if len(set(self.running().values())) > 1 and not self.witness.may_fork:
            self.witness.violated(f"{self.running()} run at one time")

    def check_progress(self) -> None:
        """After a long time without faults: whoever can run, runs."""
        stuck = self.stuck()
        if stuck:
            self.witness.violated(stuck)

    def stuck(self) -> str:
        """What is not as it must become, if there are no more faults."""
        alive, job = self.alive(), self.witness.newest
        limits = self._common["limits"]
        assert isinstance(limits, Limits)
        held = [
            each.core.agreement
            for each in alive
            if job is not None and each.core.may_claim and each.core.job == job.host
        ]
        if self.witness.may_fork or not held:
            return ""
        # What those who decide on the next one know; others may know more, but are not asked.
        newest = max([each for each in held if each], key=lambda each: each.number)
        if newest.finish is not None or (newest.host, newest.round) in self.witness.results:
            return ""
        keys = {KEEPER, *[agent.key for agent in alive]}
        for agent in alive:  # was something proposed that those who live cannot decide?
            pending = agent.core.accepted
            if pending is None or pending.number <= newest.number:
                continue
            if not self.rules(agent.core.setup).is_quorum(pending, keys):
                return ""
        members = [each for each in newest.members if each.key in keys]
        rules = self.rules(alive[0].core.setup)
        running = self.running()
        if not rules.is_quorum(newest, keys):
            return f"{sorted(running)} run without a quorum" if running else ""
        # Newcomers find the job at its endpoints only.
        is_found = any(self.is_alive(name) for name in self._names[: self._endpoints])
        # Who leaves stays a member until there is another agreement; drivers wait for two seconds.
        leaving = {each.key for each in alive if each.core.is_leaving}
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
