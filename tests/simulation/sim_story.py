"""Random stories of simulated clusters: a seed determines which faults happen to which agents.

    a few seconds to gather -> faults of all kinds -> everything whole, and time to recover -> check

Each seed is one story; with another register it is the same up to the first difference between
agents.

    python -m tests.simulation.sim_story 47              print that one, if something goes wrong
    python -m tests.simulation.sim_story 0 1000 2        play every second one up to 1000
    python -m tests.simulation.sim_story 0 1000 1 etcd   with that register, of at most 12 nodes:
                                                           peers, etcd, store, ideal
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from random import Random

from tests.simulation.sim_cluster import SimCluster
from tests.simulation.sim_keeper import SimKeeper
from tests.simulation.sim_witness import ViolationError

from rallypoint.rendezvous.consensus.participant import Part
from rallypoint.rendezvous.consensus.rules import KEEPER, Rules
from rallypoint.rendezvous.timeouts import Timeouts

TIMEOUTS = Timeouts(
    join_timeout_s=600.0,
    last_call_s=0.5,
    heartbeat_s=0.75,
    missed_heartbeats=4,
    most_beats=4,  # more would double the simulation's time
    close_s=6.0,
    outage_s=6.0,
)
MAX_SIZE = 200
_SMALL = 12
_FAULTS_S = 30.0
# By then everything must have recovered: after many changes newcomers wait for a minute.
_CALM_S = 90.0
_SETTLE_S = 8.0  # the last part of this time


def _begin(seed: int, max_size: int) -> tuple[Random, int, tuple[str, ...]]:
    random = Random(f"story {seed}")
    nodes = int(2 * (max_size / 2) ** (random.random() ** 4))  # mostly small
    if random.random() < 0.5:  # few die, but connectivity changes all the time
        return random, random.randint(2, min(7, max_size)), _DIVISIONS
    return random, nodes, _EVENTS


def size_of(seed: int) -> int:
    """The number of nodes in that story."""
    return _begin(seed, MAX_SIZE)[1]


def story(
    seed: int,
    *,
    max_size: int = MAX_SIZE,
    rules: type[Rules] = Rules,
    steady_keys: bool = False,
    faults_s: float = _FAULTS_S,
    keeper: type[SimKeeper] | None = None,
) -> SimCluster:
    """Play one story to its end.

    Raises:
        ViolationError: something happened that must never happen; it tells the story.
    """
    random, nodes, events = _begin(seed, max_size)
    max_nodes = nodes if random.random() < 0.7 else max(1, nodes - random.randint(1, nodes))
    cluster = SimCluster(
        seed=seed,
        nodes=nodes,
        min_nodes=random.choice([1, max(1, max_nodes // 2), max_nodes]),
        max_nodes=max_nodes,
        endpoints=1 if random.random() < 0.6 else min(3, nodes),
        max_restarts=random.choice([0, 3, 1000]),
        rules=rules,
        timeouts=TIMEOUTS,
        keeper=keeper,
        wishes=tuple(range(nodes)) if random.random() < 0.2 and nodes == max_nodes else (),
    )
    cluster.steady_keys = steady_keys
    cluster.network.loss = random.choice([0.0, 0.0, 0.01, 0.1])
    cluster.network.max_delay_s = random.choice([0.002, 0.02, 0.3])
    cluster.start_all(spread_s=random.choice([0.0, 2.0]))
    if events is _DIVISIONS and random.random() < 0.3:
        _overtake(cluster)  # those that begin the job
    cluster.run(random.uniform(0.0, 4.0))
    end = cluster.loop.now + faults_s
    while cluster.loop.now < end:
        _befall(cluster, random, random.choice(events))
        cluster.run(random.choice([0.003, 0.05, 0.5, 2.0, 5.0]) * random.uniform(0.5, 1.5))
        cluster.check_running()
    cluster.calm()
    for name in cluster.names:  # as a scheduler would
        if random.random() < 0.5:
            cluster.start_later(name)
    end = cluster.loop.now + _CALM_S
    cluster.run(_SETTLE_S)
    while cluster.loop.now < end and cluster.stuck():
        cluster.run(1.0)
    cluster.check_progress()
    return cluster


def _befall(  # noqa: PLR0912 - one case for each event
    cluster: SimCluster, random: Random, what: str
) -> None:
    """Let one event happen."""
    names = list(cluster.names)
    name = random.choice(names)
    places = names
    if cluster.keeper is not None:
        places = [*names, KEEPER]
        _befall_keeper(cluster, cluster.keeper, random)
    match what:
        case "kill":
            cluster.kill(name)
        case "kill leader":
            if cluster.leaders():
                cluster.kill(random.choice(cluster.leaders()))
        case "kill within":
            agent = cluster.agents.get(random.choice([name, *cluster.leaders()]))
            if agent is not None:
                agent.dies_after = random.randint(0, 2 * len(names))
        case "start":
            for each in random.sample(names, min(len(names), random.choice([1, 3]))):
                cluster.start_later(each)
        case "restart":
            if cluster.is_alive(name):
                cluster.kill(name)
                cluster.start_later(name, random.choice([0.0, 0.1, 1.0]))
        case "split":
            groups = [set[str](), set[str](), set[str]()][: random.choice([2, 2, 3])]
            for each in places:
                random.choice(groups).add(each)
            cluster.cut(groups)
        # Separates those who know the latest agreement, those who do not, and the coordinator.
        case "divide":
            know, others = cluster.divided()
            alone = set(cluster.leaders()) if random.random() < 0.5 else set[str]()
            cluster.cut([know - alone, others - alone, alone])
        case "isolate":
            some = {name, *cluster.leaders()} if random.random() < 0.5 else {name}
            cluster.cut([some, set(places) - some])
        case "deafen":
            cluster.deafen(random.choice([name, *cluster.leaders()]), set(names))
        case "mend":
            cluster.mend(is_lost=random.random() < 0.3)
        case "shift":
            cluster.mend(is_lost=random.random() < 0.5)
            _befall(cluster, random, random.choice(["split", "divide", "isolate"]))
        case "ambush":
            _ambush(cluster, random, random.choice([1, 1, 2, 3]))
        case "some succeed":  # and the others later, if nothing intervenes
            for agent in cluster.alive():
                cluster.succeed_later(agent, max(0.0, random.uniform(-4.0, 8.0)))
        case "orphan":  # kill one, while the others lose their coordinator
            cluster.cut([{name}, set(names) - {name}])
            for leader in cluster.leaders():
                cluster.kill(leader)
        case "crumble":  # some stay with a coordinator that has lost its quorum, then lose it too
            leaders = set(cluster.leaders())
            some = leaders | set(random.sample(names, len(names) // 2))
            cluster.cut([some, set(names) - some])
            cluster.cut_later([leaders, set(names) - leaders], random.uniform(1.0, 3.0))
        case "overtake":
            _overtake(cluster)
        case "duel":
            _duel(cluster)
        case "fail":
            if name in cluster.agents:
                cluster.agents[name].fail()
        case "leave":
            if name in cluster.agents:
                cluster.agents[name].leave()
        case "succeed":
            if random.random() < 0.1:
                cluster.works_for_s = random.uniform(0.1, 5.0)


def _befall_keeper(cluster: SimCluster, keeper: SimKeeper, random: Random) -> None:
    """Perhaps let something happen to the keeper, too."""
    if random.random() < 0.2:
        keeper.is_away = not keeper.is_away
        cluster.tell(f"keeper: {'away' if keeper.is_away else 'here again'}")
    if random.random() < 0.1:
        keeper.max_delay_s = random.choice([0.005, 0.05, 0.8])


def _ambush(cluster: SimCluster, random: Random, count: int) -> None:
    """Let that many events happen in the middle of ballots, where most can go wrong."""

    def spring() -> None:
        what = random.choice(_SUDDEN)
        if "kill" in what:  # the sender must finish its message
            cluster.loop.after(0.0, lambda: _befall(cluster, random, what))
        else:
            _befall(cluster, random, what)
        if count > 1:
            _ambush(cluster, random, count - 1)

    if random.random() < 0.5:
        cluster.network.ambush(int(2 ** random.uniform(0, 5)), spring)
    else:
        cluster.witness.when_agreed = spring


def _overtake(cluster: SimCluster) -> None:
    """Let the old members miss one agreement, then the next; then its coordinator is gone.

    They can continue from what they know, and then meet agents that know more.
    """

    def leave_behind() -> None:
        leaders = set(cluster.leaders())
        behind = {each.host for each in cluster.witness.before_newest()} - leaders
        cluster.cut([behind, set(cluster.names) - behind])
        cluster.witness.when_agreed = orphan

    def orphan() -> None:
        leaders = set(cluster.leaders())
        cluster.mend(is_lost=True)
        cluster.cut([leaders, set(cluster.names) - leaders])

    cluster.witness.when_agreed = leave_behind


def _duel(cluster: SimCluster) -> None:
    """Let several agents compete to replace a coordinator; the first to get an agreement dies at
    once.
    """

    def strike() -> None:
        newest = cluster.witness.newest
        for agent in cluster.alive():
            if agent.core.part is Part.LEADING and agent.core.agreement == newest:
                cluster.loop.after(0.0, partial(cluster.kill, agent.name))

    for leader in cluster.leaders():
        cluster.kill(leader)
    cluster.witness.when_agreed = strike


_SUDDEN = ("kill", "kill leader", *["split", "shift"] * 3, "divide", "isolate", "deafen", "mend")
_EVENTS = (
    *["kill", "kill leader", "kill within", "start", "start", "start", "restart", "split", "split"],
    *["isolate", "isolate", "deafen", "mend", "mend", "fail", "leave", "succeed"],
    *["shift", "ambush", "ambush", "ambush"],
)
_DIVISIONS = (
    *["ambush"] * 4,
    *["shift"] * 3,
    "divide",
    "mend",
    "start",
    "start",
    "kill",
    "leave",
    "fail",
    *["overtake"] * 3,
    *["duel"] * 2,
    *["orphan", "crumble", "crumble", "some succeed"],
)


def first_violation(seeds: Iterable[int]) -> str:
    """Play these stories up to the first that violates an invariant, and return its text."""
    for seed in seeds:
        try:
            story(seed)
        except ViolationError as error:
            return str(error)
    return ""


def _play(seeds: Iterable[int], register: str) -> str:
    from tests.simulation.sim_keeper import SimEtcd, SimStore
    from tests.simulation.sim_register import IdealRules, SimRegister

    kinds: dict[str, tuple[type[Rules], type[SimKeeper] | None]] = {
        "peers": (Rules, None),
        "etcd": (Rules, SimEtcd),
        "store": (Rules, SimStore),
        "ideal": (IdealRules, SimRegister),
    }
    rules, keeper = kinds[register]
    for seed in seeds:
        try:
            story(seed, max_size=_SMALL, rules=rules, keeper=keeper)
        except ViolationError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    _given = [int(each) for each in sys.argv[1:4]]
    _seeds = range(*_given) if len(_given) > 1 else _given
    _told = _play(_seeds, sys.argv[4]) if len(sys.argv) > 4 else first_violation(_seeds)
    sys.exit(_told or None)
