"""Random stories of jobs with real drivers and simulated workers: a seed determines what happens.

python -m tests.simulation.sim_driver_story 47        print that one, if something goes wrong
python -m tests.simulation.sim_driver_story 0 1000    play those
python -m tests.simulation.sim_driver_story 0 1000 etcd    where an etcd decides who coordinates
python -m tests.simulation.sim_driver_story 0 1000 static    of nodes that are known from the start
python -m tests.simulation.sim_driver_story 0 1000 plug-in   with a package's rendezvous
"""

from __future__ import annotations

import signal
import sys
from random import Random

from tests.simulation.sim_driver import SimJob, SimNode
from tests.simulation.sim_keeper import SimEtcd, SimKeeper
from tests.simulation.sim_rounds import Kind
from tests.simulation.sim_witness import ViolationError
from tests.simulation.sim_worker import SimWorker

from rallypoint.rendezvous.timeouts import Timeouts

_JOIN_S = 600.0
_FAULTS_S, _CALM_S = 40.0, 160.0
_ENDING_S = 60.0
_LINGER_S, _LINGERS = 35.0, 8  # after that, in each eighth story: longer than a survivor waits
_TIMEOUTS = Timeouts(last_call_s=0.5)
_FEW_HEARTBEATS = Timeouts(last_call_s=0.5, heartbeat_s=2.0, missed_heartbeats=2.5)


def story(seed: int, keeper: type[SimKeeper] | None = None, kind: Kind = Kind.ELASTIC) -> SimJob:
    """Play one to its end.

    Raises:
        ViolationError: something happened that must never happen; it tells the story.
    """
    random = Random(f"story of drivers {seed}")
    nodes = random.choice([1, 1, 2, 3, 3, 4, 5])
    loss = random.choice([0.0, 0.0, 0.1])
    job = SimJob(
        seed=seed,
        nodes=nodes,
        workers=random.choice([1, 2, 2, 3]),
        spares=random.choice([0, 0, 1]),
        min_nodes=random.choice([1, max(1, nodes // 2), nodes]),
        timeouts=_TIMEOUTS if loss else random.choice([_TIMEOUTS, _FEW_HEARTBEATS]),
        keeper=keeper,
        kind=kind,
    )
    job.network.loss = loss
    with job:
        try:
            _play(job, random)
        except Exception as error:
            told = "\n".join(job.story)
            raise ViolationError(f"{told}\nseed {seed}: {error or repr(error)}") from error
    return job


def _play(job: SimJob, random: Random) -> None:
    job.start_all()
    job.run(random.uniform(1.0, 6.0))
    end = job.loop.now + _FAULTS_S
    while job.loop.now < end:
        _befall(job, random)
        job.run(random.choice([0.003, 0.03, 0.3, 3.0, 3.0, 40.0]) * random.uniform(0.5, 1.5))
    job.mend()
    lasts = job.seed % 2
    if lasts:
        _stop_for_good(job, random)
    for worker in job.training.workers:
        if not (lasts and worker.has_state):  # others may wait for a newcomer
            worker.signal(signal.SIGCONT)
    if _is_over(job):
        _end(job)
    elif not set(job.ended) - job.left:  # as it may, if nobody was left
        _recover(job, random)


def _stop_for_good(job: SimJob, random: Random) -> None:
    """Let no signal continue a worker, which is stopped before or after the others lose one."""
    workers = [each for each in job.training.workers if each.can_run and each.has_state]
    if len(workers) > 2:  # one is left
        for each in random.sample(workers, 2):
            if random.random() < 0.5:
                each.kill()
                job.run(random.uniform(0.05, 1.0))
            else:
                each.signal(signal.SIGSTOP)


def _is_over(job: SimJob) -> bool:
    """Whether no node can replace another, or join."""
    if job.kind is Kind.STATIC:
        if not job.is_whole:
            job.run(_ENDING_S)  # some may be about to end, as others did
        return not all(node.is_alive for node in job.nodes)
    return job.kind is Kind.PLUG_IN and job.meeting.is_closed


def _end(job: SimJob) -> None:
    """All launchers end; one that was started again waits for the others before that."""
    for seconds in (_CALM_S, _JOIN_S):
        if any(node.is_alive for node in job.nodes):
            job.run(seconds)
    if any(node.is_alive for node in job.nodes):
        raise ViolationError("some launchers do not end")


def _recover(job: SimJob, random: Random) -> None:
    """All nodes run, and train."""
    leaving = [node for node in job.nodes if node.is_leaving]
    for node in job.nodes:
        job.loop.after(random.uniform(0.0, 5.0), node.start)
    end = job.loop.now + _CALM_S
    trains = False
    while not (trains and job.is_whole) and job.loop.now < end:
        before = job.training.newest, job.training.began
        job.run(5.0)
        for node in leaving:
            node.start()
        trains = (job.training.newest, job.training.began) != before
    if not job.has_quorum:
        return
    if not trains:
        raise ViolationError("nobody trains any more")
    if not job.is_whole:
        raise ViolationError("some do not come back")
    if job.seed % _LINGERS == 0:
        job.run(_LINGER_S)
        if not job.is_whole:
            raise ViolationError("some are lost without a fault")


def _whole(job: SimJob) -> list[SimNode]:
    """The nodes on which nothing is disturbed."""
    return [
        node
        for node in job.nodes
        if node.is_alive and not node.is_frozen and not any(node.name in pair for pair in job.cuts)
    ]


def _befall(job: SimJob, random: Random) -> None:  # noqa: PLR0912 - one case for each event
    """Let something happen."""
    whole = _whole(job)
    workers = [worker for node in whole for worker in node.workers() if worker.can_run]
    training = [each for each in workers if each.has_state]
    events = _EVENTS if job.keeper is None else (*_EVENTS, "no keeper")
    if job.kind is Kind.STATIC and job.seed % 3:  # others end with the first loss of a node
        events = tuple(each for each in events if each not in _LOSE_A_NODE)
    what = random.choice((*events, "load", "load") if job.seed % 2 else events)
    # Nodes that may be disturbed as a whole: without a quorum there is no recovery.
    most = (len(job.nodes) - 1) // 2 if job.kind is Kind.ELASTIC else len(job.nodes)
    may_disturb = len(job.nodes) - len(whole) < most
    match what:
        case "kill" if workers:
            for each in random.sample(workers, min(len(workers), random.choice([1, 1, 2]))):
                _keep_one(training, each, each.kill)
        case "fail" if training:
            each = random.choice(training)
            _keep_one(training, each, each.fail)
        case "all fail":
            for each in training:
                each.later(random.uniform(0.0, 0.005), each.fail)
        case "succeed" if training:
            each = random.choice(training)
            _keep_one(training, each, each.succeed)
        case "stop" if workers:
            each = random.choice(workers)
            _keep_one(training, each, lambda: _stop(job, each, random))
        case "kill a node" if may_disturb and whole:
            random.choice(whole).kill()
        case "leave" if may_disturb and whole:
            random.choice(whole).leave()
        case "start":
            for node in job.nodes:
                node.start()
        case "freeze" if may_disturb and whole:
            random.choice(whole).freeze(
                random.choice([0.3, 3.0, 9.0, 15.0]) * random.uniform(0.5, 1.5),
                all_of_it=random.random() < 0.5,
            )
        case "cut" if may_disturb and whole:
            seconds = random.choice([0.5, 5.0, 9.0, 15.0]) * random.uniform(0.5, 1.5)
            job.cut(random.choice(whole), seconds)
        case "part" if len(whole) > 1:  # only their workers notice
            one, other = random.sample(whole, 2)
            one.say(f"its workers do not reach those of {other.name}")
            job.cuts.add(frozenset((one.name, other.name)))
            job.loop.after(random.choice([5.0, 60.0]), job.mend)
        case "load":
            for _ in range(random.randrange(8)):
                random.choice(job.nodes).freeze(
                    random.uniform(0.1, 2.5), all_of_it=random.random() < 0.3
                )
                job.run(random.uniform(0.0, 1.5))
        case "no keeper" if job.keeper:
            job.keeper.is_away = True
            job.tell("etcd: away")
            job.loop.after(random.choice([0.5, 5.0, 30.0]) * random.uniform(0.5, 1.5), job.mend)


def _keep_one(training: list[SimWorker], victim: SimWorker, what: object) -> None:
    """Do it if somebody else has a state."""
    assert callable(what)
    if [each for each in training if each is not victim and each.can_run]:
        what()


def _stop(job: SimJob, worker: SimWorker, random: Random) -> None:
    seconds = random.choice([0.05, 1.0, 15.0, 1000.0]) * random.uniform(0.5, 1.5)
    worker.node.say(f"{worker.pid} is stopped for {seconds:.2f} s")
    worker.signal(signal.SIGSTOP)
    job.loop.after(seconds, lambda: worker.signal(signal.SIGCONT))


_EVENTS = (
    *["kill"] * 8,
    *["fail", "succeed", "all fail", "start", "leave"],
    *["stop"] * 3,
    *["kill a node", "cut", "freeze", "freeze"] * 2,
    "part",
)


_LOSE_A_NODE = ("kill a node", "leave", "cut", "start")


def main() -> None:
    first, *rest = map(int, filter(str.isdigit, sys.argv[1:]))
    seeds = range(first, *rest) if rest else [first]
    keeper = SimEtcd if "etcd" in sys.argv else None
    kind = next((each for each in Kind if each.value in sys.argv), Kind.ELASTIC)
    for seed in seeds:
        story(seed, keeper, kind)
    print(f"{len(seeds)} stories")


if __name__ == "__main__":
    main()
