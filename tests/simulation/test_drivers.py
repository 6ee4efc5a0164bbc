"""The real drivers in simulated time, with workers that live: what real jobs do in minutes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
from tests.simulation.known_seeds import is_needed
from tests.simulation.sim_driver import SimJob
from tests.simulation.sim_driver_story import story
from tests.simulation.sim_keeper import SimEtcd, SimKeeper
from tests.simulation.sim_network import Process
from tests.simulation.sim_rounds import Kind, SimRounds
from tests.simulation.sim_witness import ViolationError

from rallypoint.base.control_message import Stage, WorkerReport
from rallypoint.launch.agent.in_place_recovery import InPlaceRecovery
from rallypoint.launch.agent.local_workers import LocalWorkers
from rallypoint.launch.agent.loop import Agent
from rallypoint.launch.agent.node import NodeDecision, NodeState, ResumeEverything
from rallypoint.launch.agent.stuck_ranks import StuckRanks
from rallypoint.rendezvous.consensus.follower import Follower
from rallypoint.rendezvous.consensus.messages import Message
from rallypoint.rendezvous.consensus.rules import Rules
from rallypoint.rendezvous.job.reports import Stop
from rallypoint.rendezvous.job.round import Endpoint

LONG = pytest.mark.long


@pytest.mark.parametrize("keeper", [None, SimEtcd], ids=["peers", "etcd"])
@pytest.mark.parametrize(
    "first", [0, *[pytest.param(each, marks=LONG) for each in range(6, 42, 6)]]
)
def test_stories(first: int, keeper: type[SimKeeper] | None) -> None:
    for seed in range(first, first + 6):
        story(seed, keeper)


@pytest.mark.parametrize("kind", [Kind.STATIC, Kind.PLUG_IN])
@pytest.mark.parametrize(
    "first", [0, *[pytest.param(each, marks=LONG) for each in range(12, 84, 12)]]
)
def test_stories_of_other_rounds(first: int, kind: Kind) -> None:
    for seed in range(first, first + 12):
        story(seed, kind=kind)


ENDED_BADLY = [
    (10139, None, Kind.STATIC),
    (12615, SimEtcd, Kind.ELASTIC),
    (14089, None, Kind.ELASTIC),
    (14780, None, Kind.ELASTIC),
    (14780, SimEtcd, Kind.ELASTIC),
    (15991, None, Kind.ELASTIC),
    (17921, None, Kind.PLUG_IN),
    (18661, None, Kind.ELASTIC),
]


@pytest.mark.parametrize(("seed", "keeper", "kind"), ENDED_BADLY)
def test_stories_that_once_ended_badly(
    seed: int, keeper: type[SimKeeper] | None, kind: Kind
) -> None:
    story(seed, keeper, kind)


def trains_within(job: SimJob, seconds: float) -> bool:
    """Whether there are steps after that time."""
    job.run(seconds)
    before = job.training.newest
    job.run(3.0)
    return job.training.newest > before


@pytest.mark.parametrize("nodes", [1, 3])
def test_all_ranks_raise_at_once(nodes: int) -> None:
    """The usual failure: the job is restarted, whoever's agent hears of it first."""
    for seed in range(5):
        with SimJob(seed=seed, nodes=nodes, restarts=2) as job:
            job.start_all()
            job.run(5.0)
            for worker in job.training.workers:
                worker.later(job.random.uniform(0.0, 0.005), worker.fail)
            assert trains_within(job, 10.0), "\n".join(job.story)
            assert job.training.began == 2
            assert any("restart 1 of 2" in line for line in job.story)
            assert not any("restart 2 of 2" in line for line in job.story)


@pytest.mark.parametrize("is_forever", [True, False])
def test_a_rank_is_stopped_and_others_join(is_forever: bool) -> None:
    """They go to a round in which it is needed: after 10 s it is killed, and they go on."""
    for seed in range(5):
        with SimJob(seed=seed, nodes=2) as job:
            job.nodes[0].start()
            job.run(5.0)
            stopped = job.nodes[0].workers()[1]
            stopped.signal(signal.SIGSTOP)
            before = job.training.newest
            job.nodes[1].start()
            job.run(8.0)
            assert job.training.newest == before
            if not is_forever:
                stopped.signal(signal.SIGCONT)
            assert trains_within(job, 12.0), "\n".join(job.story)
            assert (job.training.began, stopped.is_dead) == (1, is_forever)
            assert len(job.training.workers) == 4


def test_a_replacement_starts_once_the_survivors_have_gone_on() -> None:
    """Or after 50 ms: its start would take their cores."""
    for seed in range(5):
        with SimJob(seed=seed, nodes=1, workers=3) as job:
            job.start_all()
            job.run(5.0)
            job.nodes[0].workers()[0].kill()
            killed_at = job.loop.now
            job.run(5.0)
            after = job.story[job.story.index(f"{killed_at:9.4f} n0: 1001 (rank 0) ends, 9") :]
            went_on = next(line for line in after if "2 ranks go on" in line)
            started = next(line for line in after if line.endswith("1004 starts"))
            assert killed_at < float(went_on.split()[0]) < float(started.split()[0])
            assert float(started.split()[0]) < killed_at + 0.06


def test_survivors_wait_for_a_node_for_as_long_as_their_launchers_do() -> None:
    for seed in range(5):
        with SimJob(seed=seed, nodes=3, min_nodes=3) as job:
            job.start_all()
            job.run(5.0)
            survivors = [*job.nodes[0].workers(), *job.nodes[1].workers()]
            job.nodes[2].kill()
            job.run(200.0)
            job.nodes[2].start()
            assert trains_within(job, 20.0), "\n".join(job.story)
            assert job.training.began == 1
            assert not any(each.is_dead for each in survivors)


@pytest.mark.parametrize("has_broken_before", [False, True])
def test_workers_of_a_plug_ins_round_do_not_wait_to_be_kept(has_broken_before: bool) -> None:
    """When another node is lost, their round ends as soon as they complain."""
    for seed in range(5):
        with SimJob(seed=seed, nodes=2, kind=Kind.PLUG_IN) as job:
            job.start_all()
            job.run(5.0)
            if has_broken_before:
                job.nodes[0].workers()[0].kill()
                job.run(45.0)
            began = job.training.began
            assert (began, job.is_whole) == (1 + has_broken_before, True), "\n".join(job.story)
            job.nodes[1].kill()
            job.run(30.0)  # for two of them, and to save
            assert job.training.size == 2, "\n".join(job.story)
            assert job.training.began == began + 1


def test_a_plug_ins_node_succeeds_while_another_waits_for_a_new_round() -> None:
    """It joins that round, also if it has seen that it must before its last worker had ended."""
    for turn in range(16):  # it looks each 200 ms, and its workers' end takes 20
        with SimJob(seed=1, nodes=3, workers=1, spares=1, kind=Kind.PLUG_IN) as job:
            job.start_all()
            job.run(5.0)
            job.nodes[0].workers()[0].kill()
            job.run(0.015 * turn)
            if worker := next((each for each in job.nodes[1].workers() if each.has_state), None):
                worker.succeed()
            assert trains_within(job, 60.0), "\n".join(job.story)
            assert job.is_whole


def test_a_complaint_about_a_rank_that_the_next_round_lacks() -> None:
    """Two nodes cannot reach each other as a group forms; before that is judged, one is lost."""
    for seed in range(5):
        with SimJob(seed=seed, nodes=3) as job:
            job.start_all()
            job.run(5.0)
            for worker in job.training.workers[:3]:
                worker.complain_of(worker.attempt, 5, had_formed=False)
            job.run(0.5)
            job.nodes[2].kill()
            assert trains_within(job, 10.0), "\n".join(job.story)


def test_reports_count_that_the_agent_has_not_read_when_a_round_stops() -> None:
    """They were sent before; the agent's process got no processor in between."""
    with SimJob(seed=1, nodes=2, workers=2) as job:
        job.start_all()
        job.run(5.0)
        agent, workers = job.nodes[0].agent, job.nodes[0].workers()
        state = agent._state
        state.elastic.discard(min(state.elastic))
        for worker in workers:
            worker.say(WorkerReport(Stage.SYNCHRONIZED, state.round, is_elastic=True))
        agent._rounds.orders.append(Stop(round=state.round, because="a rank was lost"))
        assert trains_within(job, 10.0), "\n".join(job.story)
        assert not any(worker.is_dead for worker in workers)


@pytest.mark.parametrize("late_s", [0.0, 0.01, 0.1])
def test_a_node_without_ranks_outlives_its_lease(late_s: float) -> None:
    """Its workers on standby need none: nothing is ended that the coordinator waits for."""
    for seed in range(5):
        with SimJob(seed=seed, nodes=2) as job:
            job.nodes[0].start()
            job.run(5.0)
            job.nodes[1].start()
            while not job.nodes[1].workers():
                job.run(0.01)
            job.run(late_s)
            job.nodes[1].freeze(5.3, all_of_it=True)  # longer than the lease, and not yet lost
            assert trains_within(job, 30.0), "\n".join(job.story)
            assert sum(not worker.is_dead for worker in job.training.workers) == 4
            assert all(worker.step > 0 for worker in job.nodes[1].workers()), "\n".join(job.story)


def loses_its_workers_while_its_agent_is_held_up(seed: int) -> bool:
    """Whether a node whose guardian pauses at the lease's end, and finds nobody, comes back."""
    with SimJob(seed=seed, nodes=3, min_nodes=3, keeper=SimEtcd) as job:
        job.start_all()
        job.run(5.0)
        job.nodes[2].kill()
        job.run(0.02)
        node = job.nodes[0]
        first, second = node.workers()
        first.kill()
        job.run(0.01)
        node.freeze(6.46)
        job.run(0.001)
        second.kill()
        job.run(12.0)
        job.nodes[2].start()
        job.run(30.0)
        return job.is_whole


def test_a_guardian_that_has_paused_nobody_lets_the_next_round_run() -> None:
    """Its agent did not know of that. A round that does not end its pause finds new workers so."""
    begin = NodeState.started

    def begin_without(*args: Any, **named: Any) -> NodeDecision:
        decision = begin(*args, **named)
        actions = [each for each in decision.actions if not isinstance(each, ResumeEverything)]
        return NodeDecision(tuple(actions), decision.reason)

    assert all(loses_its_workers_while_its_agent_is_held_up(seed) for seed in (4, 7, 10))
    with mock.patch.object(NodeState, "started", begin_without):
        assert not all(loses_its_workers_while_its_agent_is_held_up(seed) for seed in (4, 7, 10))


def test_what_a_paused_node_has_is_not_lost_if_the_others_wait_for_it() -> None:
    """They count it as lost meanwhile, and lose all of their own workers."""
    for seed in range(5):
        with SimJob(seed=seed, nodes=3, workers=1, min_nodes=3, keeper=SimEtcd) as job:
            job.start_all()
            job.run(5.0)
            rosters = [cast(SimRounds, each.rounds).roster() for each in job.nodes]
            node = next(
                n for n, its in zip(job.nodes, rosters, strict=True) if its.leader != its.me
            )
            node.freeze(13.0)
            (kept,) = node.workers()
            for each in job.nodes:
                if each is not node:
                    each.workers()[0].kill()
            assert trains_within(job, 30.0), "\n".join(job.story)
            assert job.is_whole, "\n".join(job.story)
            assert (job.training.began, kept.is_dead) == (1, False), "\n".join(job.story)


def wait_for_a_node(job: SimJob) -> None:
    """For longer than a survivor waits that does not hear that it is kept."""
    job.nodes[1].kill()
    job.run(100.0)
    job.nodes[1].start()


def stop_one_and_kill_another(job: SimJob) -> None:
    """The stopped one does not answer the news of the next round."""
    job.nodes[0].workers()[0].signal(signal.SIGSTOP)
    job.nodes[1].workers()[0].kill()


def stop_one_as_others_join(job: SimJob) -> None:
    """It is silent from before the next round."""
    job.nodes[1].kill()
    job.run(15.0)
    job.nodes[0].workers()[0].signal(signal.SIGSTOP)
    job.nodes[1].start()


def cut_two_from_each_other(job: SimJob) -> None:
    """Both reach the coordinator: only their workers notice."""
    job.cuts.add(frozenset((job.nodes[1].name, job.nodes[2].name)))
    job.loop.after(60.0, job.mend)


@contextlib.contextmanager
def lost_for_a_second(job: SimJob, kind: str) -> Iterator[None]:
    """Messages of that kind break with their connection."""
    send, lost = job.network.send, list[float]()

    def lose(sender: Process, to: str, at: Endpoint | None, message: Message) -> None:
        is_one = f'"{kind}"'.encode() in cast(bytes, message)
        if is_one and job.loop.now < (lost or [job.loop.now])[0] + 1.0:
            lost.append(job.loop.now)
        else:
            send(sender, to, at, message)

    with mock.patch.object(job.network, "send", lose):
        yield
    assert lost


def test_an_order_to_kill_a_rank_that_is_lost_comes_again() -> None:
    with SimJob(seed=1, nodes=3, min_nodes=2) as job:
        job.start_all()
        job.run(5.0)
        with lost_for_a_second(job, "EndRank"):
            cut_two_from_each_other(job)
            job.run(20.0)
            assert any("was killed by the launcher" in line for line in job.story)
            assert trains_within(job, 70.0), "\n".join(job.story)
        assert job.training.began == 1


def test_a_complaint_that_is_lost_comes_again() -> None:
    """Node 0 coordinates, and its own worker, which is stopped, cannot complain."""
    with SimJob(seed=1, nodes=2, workers=1, kind=Kind.STATIC) as job:
        job.start_all()
        job.run(5.0)
        (stopped,) = job.nodes[0].workers()
        stopped.signal(signal.SIGSTOP)
        with lost_for_a_second(job, "TimedOut"), lost_for_a_second(job, "ContactLost"):
            assert trains_within(job, 40.0), "\n".join(job.story)
        assert (job.training.began, stopped.is_dead) == (1, True)


def test_survivors_do_not_take_the_place_of_a_spare() -> None:
    """The others have continued without them, and the order that would end them is lost."""
    for seed in range(5):
        with SimJob(seed=seed, nodes=3, spares=1, min_nodes=2) as job:
            job.start_all()
            job.run(5.0)
            node, send = job.nodes[2], job.network.send
            survivors = [each for each in node.workers() if each.has_state]
            job.cut(node, 9.0)
            with mock.patch.object(job.network, "send", partial(lose_orders, send, node)):
                while not any("n2 joined" in line for line in job.story[-5:]):
                    job.run(0.01)
                job.run(0.1)
                assert [each.is_dead for each in survivors] == [False, False]
                job.nodes[0].workers()[0].kill()
                job.run(0.05)
            job.run(30.0)
            assert job.is_whole, "\n".join(job.story)
            assert [each.is_dead for each in survivors] == [True, True]
            assert job.training.began == 1


def lose_orders(
    send: Callable[..., None],
    node: Process,
    sender: Process,
    to: str,
    at: Endpoint | None,
    message: Message,
) -> None:
    """Send all but orders to begin a round on that node."""
    if to != node.key or b'"Go"' not in cast(bytes, message):
        send(sender, to, at, message)


def test_newcomers_end_as_their_round_begins() -> None:
    """Their agent is held up meanwhile, and the others go on without ranks of that node."""
    for seed in range(10):
        with SimJob(seed=seed, nodes=3) as job:
            job.start_all()
            job.run(5.0)
            node = job.nodes[2]
            node.kill()
            job.run(3.0)
            node.start()
            while not any("workers of node 2 (n2) joined" in line for line in job.story):
                job.run(0.001)
            node.freeze(4.0 + 0.25 * seed)
            job.run(60.0)
            assert job.is_whole, "\n".join(job.story[-40:])


def test_the_last_rank_of_a_node_is_lost_while_newcomers_wait() -> None:
    """They end with it, and the node gets all of its ranks back."""
    for seed in range(5):
        with SimJob(seed=seed, nodes=2, workers=3) as job:
            job.start_all()
            job.run(5.0)
            last, *others = job.nodes[0].workers()
            for worker in others:
                worker.kill()
            while not any("a worker of node 0 (n0) will join" in line for line in job.story):
                job.run(0.001)
            last.kill()
            job.run(10.0)
            assert job.is_whole, "\n".join(job.story)


WITHOUT: dict[str, tuple[type, str, Callable[[SimJob], None], int]] = {
    "word that a worker is kept": (LocalWorkers, "keep", wait_for_a_node, 3),
    "a deadline for an answer": (LocalWorkers, "_expect", stop_one_and_kill_another, 2),
    "a deadline for the stopped": (LocalWorkers, "stopped", stop_one_as_others_join, 2),
    "complaints": (StuckRanks, "complains", cut_two_from_each_other, 2),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_what_is_needed(what: str) -> None:
    """Without it, a story ends badly; with it, it does not."""
    owner, name, befall, min_nodes = WITHOUT[what]

    def ends_well() -> bool:
        with SimJob(seed=1, nodes=3, min_nodes=min_nodes) as job:
            job.start_all()
            job.run(5.0)
            try:
                befall(job)
                return trains_within(job, 200.0) and job.training.began == 1
            except ViolationError:
                return False

    assert ends_well()
    with mock.patch.object(owner, name, lambda *_, **__: None):
        assert not ends_well()


# What random stories notice the absence of: what is put in its place.
NEEDED: dict[str, tuple[type, str, object]] = {
    "NoWordThatAWorkerIsKept": (LocalWorkers, "keep", lambda *_: None),
    "NoWorkersOnStandby": (LocalWorkers, "stand_by", lambda *_: None),
    "LostStandbysStayLost": (InPlaceRecovery, "lost_standby", lambda *_: None),
    "OneVoterIsAQuorum": (Rules, "is_quorum", lambda _self, _agreement, keys: bool(keys)),
    "NoDeadlineForAnAnswer": (LocalWorkers, "_expect", lambda *_: None),
    "NoDeadlineForTheStopped": (LocalWorkers, "stopped", lambda *_: None),
    "NoComplaints": (StuckRanks, "complains", lambda *_: None),
    "NoLease": (Follower, "fence_at", property(lambda _: None)),
    "TheGuardianKnowsNoLease": (Agent, "_renew_fence", lambda *_: None),
}


@pytest.mark.parametrize("what", NEEDED)
def test_what_random_stories_notice(what: str) -> None:
    owner, name, otherwise = NEEDED[what]

    def without(seed: int) -> None:
        with mock.patch.object(owner, name, otherwise):
            story(seed)

    assert is_needed(what, range(60), without, story)
