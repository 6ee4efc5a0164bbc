"""A simulated cluster: the agents' own decisions, with simulated workers, clocks and network.

    cluster = SimCluster(seed=7, nodes=5, min_nodes=2, max_nodes=5)
    cluster.start_all(); cluster.run(10); cluster.kill(2); cluster.run(10); cluster.check()

It watches from outside, knowing what no agent can, and raises `ViolationError`, with the story so
far, when two agents hold different agreements of one number, when workers of two rounds run at one
time, when a rank changes without need, or when a restart is charged for which nobody failed.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

from rallypoint.rendezvous.decide import Part, Participant
from rallypoint.rendezvous.etcd_rules import EtcdRules
from rallypoint.rendezvous.etcd_voter import EtcdVoter
from rallypoint.rendezvous.members import Limits
from rallypoint.rendezvous.patience import Patience
from rallypoint.rendezvous.protocol import (
    Agreement,
    Begin,
    Call,
    Decision,
    Message,
    OpenStore,
    Send,
    Setup,
)
from rallypoint.rendezvous.reports import (
    Broken,
    Ended,
    Finish,
    Leave,
    Notice,
    Report,
    Stop,
)
from rallypoint.rendezvous.round import Endpoint, Member, Seat
from rallypoint.rendezvous.rules import ETCD, Rules
from rallypoint.rendezvous.verdict import Cause
from rallypoint.testing.sim_clock import SimClock, SimLoop
from rallypoint.testing.sim_etcd import SimEtcd, SimEtcdLink
from rallypoint.testing.sim_network import Process, SimNetwork


class ViolationError(AssertionError):
    """What must never happen has happened."""


class SimAgent(Process):
    """One agent process and its workers."""

    def __init__(self, cluster: SimCluster, name: str, key: str, setup: Setup) -> None:
        self.name, self.key, self.host = name, key, name
        self.at = Endpoint(host=setup.me.address, port=setup.me.port)
        self.is_alive = True
        self.seat: Seat | None = None
        self.last_seat: Seat | None = None
        self.finish: Finish | None = None
        self.core = Participant(setup, Random(cluster.random.random()), cluster.rules)
        self.clock = SimClock(
            cluster.loop,
            offset_s=cluster.random.uniform(0, 1000),
            speed=1 + cluster.random.uniform(-0.5, 0.5) * setup.drift,
        )
        self.dies_after: int | None = None  # so many more actions
        self.job = ""
        self.etcd: SimEtcdLink | None = None
        if cluster.etcd is not None:
            given = cluster.rules
            etcd_rules = given if issubclass(given, EtcdRules) else EtcdRules
            self.etcd = SimEtcdLink(setup, self.clock, cluster.etcd, self._hear_etcd, etcd_rules)
        self._cluster = cluster
        self._alarm = float("inf")
        self._stopping = False

    # What the network tells.

    def hear(self, sender: str, message: Message) -> None:
        """See Process."""
        self.perform(self.core.received(sender, message, self.clock.now()))

    def hear_closed(self, key: str) -> None:
        """See Process."""
        if self.is_alive:
            if self.etcd is not None:
                self.etcd.voter.lost(key)
            self.perform(self.core.closed(key, "its connection closed", self.clock.now()))

    def hear_unreachable(self, at: Endpoint) -> None:
        """See Process."""
        if self.is_alive:
            self.perform(self.core.unreachable(at, "connection refused", self.clock.now()))

    def _hear_etcd(self, voter: EtcdVoter) -> None:
        for answer in voter.take():
            if not self.is_alive:
                return
            if isinstance(answer, str):
                self.hear_unreachable(self.core.setup.endpoints[0])
            else:
                self.hear(ETCD, answer)

    # What it does.

    def perform(self, decision: Decision) -> None:
        """Perform a decision, or die within it."""
        cluster = self._cluster
        if decision.reason:
            cluster.tell(f"{self.name} {self.core.part.value}: {decision.reason}")
        for action in decision.actions:
            if self.dies_after is not None:
                self.dies_after -= 1
                if self.dies_after < 0:
                    return cluster.kill_agent(self, "in the middle of a decision")
            match action:
                case Send(to="etcd", message=message) | Call(message=message) if self.etcd:
                    self.etcd.send(message)
                case Send(to=to, at=at, message=message):
                    cluster.network.send(self, to, at, message)
                case Call(at=at, message=message):
                    cluster.network.call(self, at, message)
                case OpenStore(round=number):
                    self._open_store(number)
                case Begin(seat=seat):
                    self._begin(seat)
                case Stop():
                    self._stop(action)
                case Finish():
                    self.finish = action
                    self._end_by(0.1 if self.seat else 0.0)
                case Notice(text=text):
                    cluster.tell(f"{self.name} says: {text}")
        cluster.look_at(self)
        self._set_alarm()
        return None

    def report(self, report: Report) -> None:
        """Its workers, or a signal, report."""
        if self.is_alive:
            self.perform(self.core.reported(report, self.clock.now()))

    def _open_store(self, number: int) -> None:
        def opened() -> None:
            if self.is_alive:
                store = Endpoint(host=self.at.host, port=30000 + number)
                self.perform(self.core.store_opened(number, store, self.clock.now()))

        self._cluster.loop.after(self._cluster.random.uniform(0.0, 0.002), opened)

    def _begin(self, seat: Seat) -> None:
        if self.seat is not None:
            raise ViolationError(self._cluster.story(f"{self.name} begins twice"))
        self.seat = self.last_seat = seat
        self._stopping = False
        self._cluster.begun(self, seat)

    def fail(self) -> None:
        """A worker fails, and the rest of them ends."""
        seat = self.seat
        if seat is None or self._stopping or not self.is_alive:
            return
        self._stopping = True
        self._cluster.failures.add(seat.number)
        self._cluster.tell(f"{self.name}: a worker fails")
        self.report(Broken(node_rank=seat.node_rank, round=seat.number, text="rank failed"))
        cause = Cause(
            rank=seat.first_rank,
            node_rank=seat.node_rank,
            text="rank failed",
            time_s=self._cluster.loop.now,
        )
        self._cluster.loop.after(0.05, lambda: self._end(seat, succeeded=False, causes=(cause,)))

    def succeed(self) -> None:
        """All workers end well."""
        seat = self.seat
        if seat is not None and not self._stopping and self.is_alive:
            self._end(seat, succeeded=True)

    def leave(self) -> None:
        """SIGTERM."""
        if not self.is_alive or self.core.part is Part.DONE:
            return
        self._cluster.tell(f"{self.name}: SIGTERM")
        self.report(Leave(text="SIGTERM stopped it"))
        if self.seat is not None and not self._stopping:
            self._end_later(self.seat, self._cluster.random.uniform(0.01, 0.3))

    def _stop(self, stop: Stop) -> None:
        seat = self.seat
        if seat is None or seat.number != stop.round:
            return
        if stop.at_once:  # at most what an agent is allowed
            kill_s = self._cluster.kill_s * self._cluster.random.uniform(0.1, 0.95)
            self._end_later(seat, kill_s)
        elif not self._stopping:
            self._end_later(seat, self._cluster.random.uniform(0.005, self._cluster.grace_s))

    def _end_later(self, seat: Seat, delay_s: float) -> None:
        self._stopping = True
        self._cluster.loop.after(delay_s, lambda: self._end(seat, succeeded=False))

    def _end(self, seat: Seat, *, succeeded: bool, causes: tuple[Cause, ...] = ()) -> None:
        if self.seat is not seat or not self.is_alive:
            return
        self.seat = None
        self._cluster.ended(self, seat, succeeded=succeeded)
        end = Ended(node_rank=seat.node_rank, round=seat.number, succeeded=succeeded, causes=causes)
        self.report(end)

    def _end_by(self, delay_s: float) -> None:
        def end() -> None:
            if self.is_alive:
                self._cluster.exited(self)

        self._cluster.loop.after(delay_s, end)

    def start(self) -> None:
        """The process begins."""
        self.perform(self.core.started(self.clock.now()))

    def _set_alarm(self) -> None:
        wake_at = self.core.wake_at
        if wake_at is None or not self.is_alive:
            return
        when = max(self.clock.when(wake_at), self._cluster.loop.now)
        if when < self._alarm or self._alarm <= self._cluster.loop.now:
            self._alarm = when
            self._cluster.loop.at(when, lambda: self._ring(when))

    def _ring(self, when: float) -> None:
        if not self.is_alive or when != self._alarm:
            return
        self._alarm = float("inf")
        now = self.clock.now()
        wake_at = self.core.wake_at
        if wake_at is not None and now < wake_at - 1e-9:
            return self._set_alarm()
        # Rounding must not make time stand still.
        self.perform(self.core.tick(max(now, wake_at or now)))
        return None


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
        patience: Patience = Patience(),  # noqa: B008 - frozen
        wishes: tuple[int | None, ...] = (),
        names: tuple[str, ...] = (),
        has_etcd: bool = False,
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.rules = EtcdRules if has_etcd and rules is Rules else rules
        self.loop = SimLoop()
        self.network = SimNetwork(self.loop, self.random)
        self.etcd = SimEtcd(self.loop, self.random) if has_etcd else None
        self.kill_s, self.grace_s = 1.0, 0.1
        self.works_for_s: float | None = None  # after which workers succeed
        self.agents: dict[str, SimAgent] = {}  # the newest of each node, by name
        self.failures: set[int] = set()  # rounds with a failed worker
        self.lines: list[str] = []
        self.agreed: dict[str, list[Agreement]] = {}  # by job, which is known by who began it
        self.newest: Agreement | None = None
        self.outcomes: list[Finish] = []
        self.steady_keys = False  # a mutation: an agent that is started again has its old key
        self._rounds: dict[tuple[str, int], dict[int, str]] = {}
        self._running: Counter[tuple[str, int]] = Counter()
        self._names = names or tuple([f"n{i}" for i in range(nodes)])
        self._starts: Counter[str] = Counter()
        self._held: dict[str, Agreement | None] = {}
        self._wishes = wishes
        self._common = {
            "run_id": "job",
            "limits": Limits(
                min_nodes=min_nodes,
                max_nodes=max_nodes,
                join_timeout_s=patience.join_timeout_s,
                last_call_s=patience.last_call_s,
            ),
            "endpoints": tuple(
                [Endpoint(host=name, port=29400) for name in self._names[:endpoints]]
            ),
            "max_restarts": max_restarts,
            "patience": patience,
            "quorum": quorum,
            "kill_s": self.kill_s,
        }
        self._endpoints = 0 if has_etcd else endpoints
        self._late_endpoints = 0

    # What a story asks and does.

    @property
    def names(self) -> tuple[str, ...]:
        """All nodes."""
        return self._names

    def is_alive(self, name: str) -> bool:
        """Whether an agent runs on that node."""
        return name in self.agents and self.agents[name].is_alive

    @property
    def may_fork(self) -> bool:
        """Whether so many endpoints have agents that know nothing that a second job may begin.

        What an endpoint's agent promised dies with it. Documented; with three endpoints it takes
        two that are started again while none of the first job can be reached.
        """
        if self.etcd is not None:
            return False
        return self._late_endpoints > (self._endpoints - 1) // 2

    def leaders(self) -> list[str]:
        """Who believes to coordinate."""
        return [each.name for each in self.alive() if each.core.part is Part.LEADING]

    def start(self, name: str) -> SimAgent:
        """An agent is started on that node, anew if it ran before."""
        self._starts[name] += 1
        is_late = self.newest is not None or self._starts[name] > 1
        self._late_endpoints += is_late and name in self._names[: self._endpoints]
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
            self.loop.after(delay_s, partial(self._start_once, name))

    def _start_once(self, name: str) -> None:
        if name not in self.agents:
            self.start(name)

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

    def cut(self, groups: list[set[str]]) -> None:
        """Only who is in one group reaches each other."""
        self.tell(f"network: split into {' | '.join(' '.join(sorted(each)) for each in groups)}")
        if self.etcd is not None:
            self.etcd.cuts = {name for group in groups if ETCD not in group for name in group}
        for group in groups:
            for other in groups:
                if group is not other:
                    self.network.cut(group, other)

    def deafen(self, name: str, names: set[str]) -> None:
        """It is still heard, but hears nobody."""
        self.tell(f"network: {name} hears nobody")
        self.network.cut(names, {name})

    def mend(self) -> None:
        """No cable is cut any more."""
        self.tell("network: whole again")
        self.network.mend()
        if self.etcd is not None:
            self.etcd.cuts, self.etcd.is_away = set(), False

    # What agents do.

    def begun(self, agent: SimAgent, seat: Seat) -> None:
        """Workers run."""
        agent.job = agent.core.job
        this = (agent.job, seat.number)
        self._running[this] += 1
        others = [
            number
            for (job, number), count in self._running.items()
            if count and (job, number) != this and (job == agent.job or not self.may_fork)
        ]
        self.tell(
            f"{agent.name}: round {seat.number} begins, node {seat.node_rank} of {seat.nodes}"
        )
        if others:
            raise ViolationError(
                self.story(f"round {seat.number} begins while round {others[0]} still runs")
            )
        places = self._rounds.setdefault(this, {-1: str(seat.nodes)})
        known = places.setdefault(seat.node_rank, agent.key)
        if known != agent.key or places[-1] != str(seat.nodes):
            raise ViolationError(self.story(f"round {seat.number} is not the same for all"))
        if self.works_for_s is not None:
            self.loop.after(self.works_for_s, lambda: self._worked(agent, seat))

    def _worked(self, agent: SimAgent, seat: Seat) -> None:
        if agent.seat is seat:
            agent.succeed()

    def ended(self, agent: SimAgent, seat: Seat, *, succeeded: bool) -> None:
        """They run no more."""
        self._running[agent.job, seat.number] -= 1
        how = "succeeded" if succeeded else "ended"
        self.tell(f"{agent.name}: round {seat.number} {how}")

    def exited(self, agent: SimAgent) -> None:
        """An agent's process ends by itself."""
        assert agent.finish is not None
        self.tell(f"{agent.name}: agent exits ({agent.finish.outcome.value})")
        self.outcomes.append(agent.finish)
        self._bury(agent)

    def _bury(self, agent: SimAgent) -> None:
        agent.is_alive = False
        self._held.pop(agent.key, None)
        if agent.seat is not None:
            self._running[agent.job, agent.seat.number] -= 1
            agent.seat = None
        self.network.died(agent)

    # What must hold.

    def look_at(self, agent: SimAgent) -> None:
        """Compare what this agent holds with what all others ever held."""
        decided = agent.core.agreement
        if decided is None or decided is self._held.get(agent.key):
            return
        self._held[agent.key] = decided
        if decided.number < 0:
            return
        job = self.agreed.setdefault(decided.host, [])
        known = next((each for each in job if each.number == decided.number), None)
        if known is None:
            job.append(decided)
            job.sort(key=lambda each: each.number)
            if decided is job[-1]:
                self.newest = decided
            self._check_follow_up(job, decided)
        elif known != decided:
            text = f"{agent.name} holds another agreement {decided.number}: {_text(decided)}"
            raise ViolationError(self.story(f"{text}, not {_text(known)}"))

    def _check_follow_up(self, job: list[Agreement], new: Agreement) -> None:
        if new.restarts > len(self.failures):
            charged = f"{new.restarts} restarts are charged for {len(self.failures)} failures"
            raise ViolationError(self.story(charged))
        if not new.runs:
            return
        # A round that was agreed on may have begun nowhere: ranks stay since that one, or since
        # the one that ran before it.
        old_ranks: dict[str, int] = {}
        agreed: dict[str, int] = {}
        for old in job:  # ranks that ran, of those who stayed since
            if old.runs and old.number < new.number:
                agreed = {member.key: member.node_rank for member in old.members}
            if old.runs and (old.host, old.round) in self._rounds and old.number < new.number:
                old_ranks = {member.key: member.node_rank for member in old.members}
            stay = {member.key for member in old.members}
            old_ranks = {key: rank for key, rank in old_ranks.items() if key in stay}
        wished = {member.wish for member in new.members if member.wish is not None}
        for member in new.members:
            rank = old_ranks.get(member.key, -1)
            is_free = 0 <= rank < len(new.members) and rank not in wished
            stays = member.node_rank in (rank, agreed.get(member.key))
            if is_free and member.wish is None and not stays:
                text = f"{member.host} had rank {rank}, and has {member.node_rank}"
                raise ViolationError(self.story(text))

    def running(self) -> dict[str, int]:
        """Which node runs which round."""
        return {name: each.seat.number for name, each in self.agents.items() if each.seat}

    def alive(self) -> list[SimAgent]:
        """The agents that have not ended."""
        return [agent for agent in self.agents.values() if agent.is_alive]

    def check_running(self) -> None:
        """What runs is one round."""
        if len(set(self.running().values())) > 1 and not self.may_fork:
            raise ViolationError(self.story(f"{self.running()} run at one time"))

    def check_progress(self) -> None:
        """After a long time without faults: whoever can run, runs."""
        alive = self.alive()
        newest = self.newest
        limits = self._common["limits"]
        assert isinstance(limits, Limits)
        if self.may_fork or newest is None or newest.finish is not None or not alive:
            return
        keys = {agent.key for agent in alive} | {ETCD}
        for agent in alive:  # was something proposed that those who live cannot decide?
            pending = agent.core.accepted
            if pending is None or pending.number <= newest.number:
                continue
            if not self.rules(agent.core.setup).is_quorum(pending, keys):
                return
        members = [each for each in newest.members if each.key in keys]
        rules = self.rules(alive[0].core.setup)
        running = self.running()
        if not rules.is_quorum(newest, keys):
            if running:
                raise ViolationError(self.story(f"{sorted(running)} run without a quorum"))
            return
        # Newcomers find the job at its endpoints only.
        is_found = any(self.is_alive(name) for name in self._names[: self._endpoints])
        is_found = is_found or self.etcd is not None
        count = len(alive) if is_found else len(members)
        if count >= limits.min_nodes and (members or self.etcd is not None):
            places = {agent.seat.nodes for agent in alive if agent.seat}
            wanted = min(limits.max_nodes, count)
            if len(running) < min(wanted, limits.min_nodes) or places != {len(running)}:
                raise ViolationError(
                    self.story(f"only {sorted(running)} run, of {len(alive)}, and {wanted} could")
                )

    # The story.

    def tell(self, text: str) -> None:
        """Write it down."""
        self.lines.append(f"{self.loop.now:9.3f}  {text}")

    def story(self, end: str) -> str:
        """All of it, for people."""
        return "\n".join(
            [f"seed {self.seed}:", *self.lines[-400:], f"{self.loop.now:9.3f}  !! {end}"]
        )


def _text(agreement: Agreement) -> str:
    hosts = " ".join(member.key for member in agreement.members)
    kind = f"round {agreement.round}" if agreement.runs else "no round"
    return f"{kind} of {hosts}"
