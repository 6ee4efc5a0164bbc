"""A node whose workers go on when others are lost."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from rallypoint.base.control_message import Stage, WorkerError, WorkerReport
from rallypoint.launch.agent.local_workers import LocalWorkers
from rallypoint.launch.agent.node import (
    EndElsewhere,
    EndEverything,
    KeepWorkers,
    NodeDecision,
    NodeState,
    PauseEverything,
    Phase,
    ResumeEverything,
    SignalWorkers,
    Tell,
)
from rallypoint.launch.job import Job
from rallypoint.launch.worker_group import WorkerExit
from rallypoint.rendezvous.job.reports import (
    Ending,
    Finish,
    Notice,
    Outcome,
    Stop,
)
from rallypoint.rendezvous.job.round import Endpoint, Seat


def node(ranks: int = 3, *, elastic: tuple[int, ...] = (0, 1, 2)) -> NodeState:
    state = NodeState(shutdown_timeout_s=30.0)
    state.started(4, range(ranks))
    for rank in elastic:
        state.worker_is_elastic(rank, is_on=True)
    return state


def ended(rank: int, at: float = 1.0, **how: int) -> WorkerExit:
    return WorkerExit(rank=rank, local_rank=rank, pid=100 + rank, time_s=at, **how)  # type: ignore[arg-type]


def killed(rank: int) -> WorkerExit:
    return ended(rank, signal=9)


def kept(ready: int = 0, **how: tuple[int, ...]) -> NodeState:
    state = node(**how)  # type: ignore[arg-type]
    state.ready = ready
    state.worker_exited(killed(1), 1.0)
    state.round_stopped(Stop(round=4, because="rank 1 failed"), 1.0)
    return state


def test_survivors_are_not_signalled() -> None:
    state = node()
    decision = state.worker_exited(killed(1), 1.0)
    (told,) = decision.actions
    assert isinstance(told, Tell)
    assert told.report.broken
    assert not told.report.is_over
    assert state.phase.value == "running"
    decision = state.round_stopped(Stop(round=4, because="rank 1 failed"), 1.0)
    told, keep = decision.actions
    assert keep == KeepWorkers((0, 2), 4)
    assert isinstance(told, Tell)
    end = told.report
    assert end.is_over
    assert (end.survivors, end.succeeded, [cause.rank for cause in end.causes]) == (2, False, [1])
    assert state.phase is Phase.KEEPING


def test_who_has_not_said_so_is_killed() -> None:
    state = node(elastic=(0,))
    state.worker_exited(killed(1), 1.0)
    decision = state.round_stopped(Stop(round=4, because="rank 1 failed"), 1.0)
    assert decision.actions[0] == SignalWorkers((2,), 9)
    assert isinstance(decision.actions[1], Tell)
    notice = decision.actions[-1]
    assert isinstance(notice, Notice)
    assert "killing rank 2: not under elastic.run" in notice.text
    state.worker_exited(killed(2), 1.1)
    assert [failure.rank for failure in state.group.failures()] == [1], "2 is our doing"


@pytest.mark.parametrize("elastic", [(), (1,)])
def test_without_survivors_all_is_as_before(elastic: tuple[int, ...]) -> None:
    state = node(elastic=elastic)
    decision = state.worker_exited(killed(1), 1.0)
    assert decision.actions[0] == SignalWorkers((0, 2), 15)
    assert state.phase is Phase.STOPPING


def test_who_has_left_is_no_survivor() -> None:
    state = node(elastic=(0, 2))
    state.worker_is_elastic(0, is_on=False)
    assert state.survivors == {2}


def test_the_next_round() -> None:
    state = kept()
    state.started(5, range(6, 8), 1, local_ranks={6: 0, 7: 2}, elastic=(6, 7))
    assert (state.phase, state.round, state.survivors) == (Phase.RUNNING, 5, {6, 7})
    assert state.group.local_ranks == {6: 0, 7: 2}
    assert state.group.failures() == []


def test_a_signal_stops_survivors() -> None:
    state = kept()
    decision = state.stop_requested(15, "SIGTERM stopped node 0", 2.0)
    assert decision.actions[0] == SignalWorkers((0, 2), 15)
    asked = [each.report.stop_asked for each in decision.actions if isinstance(each, Tell)]
    assert asked[-1] == "SIGTERM stopped node 0"
    assert state.phase is Phase.STOPPING


def test_a_round_that_begins_while_all_is_stopped_ends_with_it() -> None:
    state = kept()
    state.stop_requested(15, "SIGTERM stopped node 0", 2.0)
    assert state.started(5, range(2)).actions == ()
    for rank in (0, 2):
        state.worker_exited(ended(rank, 3.0, signal=15), 3.0)
    (told,) = state.everything_ended(()).actions
    assert isinstance(told, Tell)
    assert told.report.is_over
    assert (told.report.round, told.report.survivors) == (5, 0)


def test_nothing_is_ready_once_everything_has_ended() -> None:
    """Workers on standby end with the others."""
    state = kept()
    state.workers_ready(1)
    state.round_stopped(Stop(round=4, because="no lease", ending=Ending.KILL), 2.0)
    (told,) = state.everything_ended(()).actions
    assert isinstance(told, Tell)
    assert told.report.ready == 0


def test_who_is_cut_off_keeps_nobody() -> None:
    state = kept()
    decision = state.round_stopped(Stop(round=4, because="no lease", ending=Ending.KILL), 2.0)
    assert decision.actions == (EndEverything(),)
    assert state.phase is Phase.ENDING


@pytest.mark.parametrize("is_over", [False, True], ids=["in a round", "after it"])
def test_without_a_lease_survivors_are_paused(is_over: bool) -> None:
    state = kept() if is_over else node(elastic=(0, 2))
    alone = Stop(round=4, because="no message", ending=Ending.PAUSE)
    actions = state.round_stopped(alone, 2.0).actions
    assert PauseEverything() in actions
    if not is_over:
        kill, told = actions[:2]
        assert kill == SignalWorkers((1,), 9), "it cannot go on"
        assert isinstance(told, Tell)
        assert told.report.is_over
        assert told.report.survivors == 2
    assert state.phase is Phase.KEEPING
    assert state.started(5, range(2), elastic=(0, 1)).actions == (ResumeEverything(),)
    assert state.started(6, range(2)).actions == (), "once"


def test_paused_workers_do_not_run_to_end() -> None:
    alone = Stop(round=4, because="no message", ending=Ending.PAUSE)
    finish = Finish(outcome=Outcome.GIVEN_UP, because="alone")
    stale = Stop(round=4, because="others have continued", ending=Ending.KILL)
    for how in ("signal", "finish", "stale"):
        state = node()
        state.round_stopped(alone, 2.0)
        match how:
            case "signal":
                actions = state.stop_requested(15, "SIGTERM stopped node 0", 3.0).actions
            case "finish":
                actions = state.finished(finish, 3.0).actions
            case _:
                actions = state.round_stopped(stale, 3.0).actions
        assert actions[0] == EndEverything()
        assert not any(isinstance(each, SignalWorkers | ResumeEverything) for each in actions)
        state.everything_ended(())
        assert not state.is_paused


def test_without_survivors_nobody_is_paused() -> None:
    state = node(elastic=())
    alone = Stop(round=4, because="no message", ending=Ending.PAUSE)
    assert EndEverything() in state.round_stopped(alone, 2.0).actions


def test_a_round_without_workers_here() -> None:
    state = kept()
    resume, told = state.started(5, range(3, 3)).actions
    assert resume == ResumeEverything()
    assert isinstance(told, Tell)
    assert told.report.is_over
    assert (told.report.succeeded, told.report.survivors) == (True, 0)
    (told,) = state.workers_ready(2).actions
    assert isinstance(told, Tell)
    assert (told.report.round, told.report.ready, told.report.waits) == (5, 2, True)


def test_a_round_begins_while_all_is_being_ended() -> None:
    """Who had no ranks before has no success in it, for which the others would wait."""
    state = kept()
    state.started(5, range(3, 3))
    state.round_stopped(Stop(round=5, because="no message", ending=Ending.KILL), 2.0)
    assert not state.started(6, range(2)).reason
    (told,) = state.everything_ended(()).actions
    assert isinstance(told, Tell)
    assert (told.report.round, told.report.is_over, told.report.succeeded) == (6, True, False)


def test_what_is_known_is_not_told_again() -> None:
    state = kept()
    assert len(state.workers_ready(1).actions) == 1
    assert state.workers_ready(1).actions == ()
    (told,) = state.workers_ready(0).actions
    assert isinstance(told, Tell)
    assert (told.report.ready, told.report.survivors) == (0, 2)
    state.started(5, range(2))
    assert len(state.workers_ready(1).actions) == 1, "in another round it is news"


@pytest.mark.parametrize(("lost", "newcomers_lost"), [(1, 1), (0, 0)])
def test_lost_newcomers_are_counted(lost: int, newcomers_lost: int) -> None:
    state = kept()
    state.started(5, range(3), elastic=range(3), newcomers=[1])
    state.worker_exited(killed(lost), 2.0)
    told, _ = state.round_stopped(Stop(round=5, because="it failed"), 2.0).actions
    assert isinstance(told, Tell)
    assert told.report.is_over
    assert sum(cause.is_newcomer for cause in told.report.causes) == newcomers_lost


# Failures of several ranks that are one.


def raised(rank: int) -> WorkerError:
    return WorkerError(type="ValueError", message="loss is nan", traceback="", time_s=1.0)


def fails(state: NodeState, rank: int, now: float) -> NodeDecision:
    state.worker_reported(rank, raised(rank), now)
    return state.worker_exited(ended(rank, now, code=1), now)


def test_an_exception_may_come_from_all_ranks() -> None:
    """Only if the others have not raised it soon after, they go on."""
    state = node()
    assert not fails(state, 1, 1.0).actions
    assert state.wake_at is not None
    (told,) = state.tick(state.wake_at).actions
    assert isinstance(told, Tell)
    assert told.report.broken
    assert not told.report.is_over
    state = node()
    assert not fails(state, 1, 1.0).actions
    assert not fails(state, 2, 1.0).actions
    ended, *_ = fails(state, 0, 1.01).actions
    assert ended == EndEverything()
    (told,) = state.everything_ended(()).actions
    assert isinstance(told, Tell)
    assert told.report.is_over
    assert [cause.rank for cause in told.report.causes] == [1, 2, 0]


def test_a_death_is_told_at_once_after_an_exception() -> None:
    state = node()
    fails(state, 1, 1.0)
    (told,) = state.worker_exited(killed(2), 1.0).actions
    assert isinstance(told, Tell)
    assert told.report.broken
    assert not told.report.is_over


def test_how_a_worker_ended_before_the_next_round_is_kept() -> None:
    state = kept()
    fails(state, 2, 1.2)
    (lost,) = state.lost_while_kept
    state.started(5, range(6, 8), local_ranks={6: 0, 7: 2}, elastic=(6,))
    state.worker_missed(7, lost, 1.3)
    told, _ = state.round_stopped(Stop(round=5, because="rank 7 failed"), 1.4).actions
    assert isinstance(told, Tell)
    assert told.report.is_over
    (cause,) = told.report.causes
    assert cause.text == "rank 7 raised ValueError: loss is nan"
    assert (cause.is_charged, cause.is_startup) == (True, False)


def test_that_the_launcher_killed_it_is_kept_too() -> None:
    state = kept()
    state.group.killing(2, "it did not answer")
    state.worker_exited(killed(2), 1.2)
    (lost,) = state.lost_while_kept
    state.started(5, range(6, 8), local_ranks={6: 0, 7: 2}, elastic=(6,))
    state.worker_missed(7, lost, 1.3)
    (failure,) = state.group.failures()
    assert failure.text == "rank 7 was killed by the launcher, as it did not answer"
    assert (failure.local_rank, failure.pid) == (2, 102)


@pytest.mark.parametrize("phase", ["running", "kept"])
def test_who_leaves_a_training_in_which_others_go_on_is_missed(phase: str) -> None:
    state = node() if phase == "running" else kept()
    end = ended(2, code=0)
    decision = state.worker_exited(end, 1.0)
    if phase == "running":
        (told,) = decision.actions
        assert isinstance(told, Tell)
        assert "rank 2 exited with code 0 before the training was over" in str(told.report)
    else:
        assert [lost.is_early for lost in state.lost_while_kept] == [True]


def test_who_is_asked_to_end_leaves_nothing_early() -> None:
    state = node()
    state.stop_requested(15, "SIGTERM", 1.0)
    assert not state.worker_exited(ended(0, 1.1, code=0), 1.1).actions
    assert not state.group.failures()


# Ranks that keep the others waiting.


def test_a_rank_that_hangs_is_killed_where_it_is() -> None:
    (signal,) = node().hangs("the job hung", 1, 1.0).actions
    assert signal == SignalWorkers((1,), 9)
    state = node()
    (elsewhere,) = state.hangs("the job hung", 7, 1.0).actions
    assert elsewhere == EndElsewhere(7, 4, "the job hung")
    assert state.phase is Phase.RUNNING, "the workers here are left alone"


def test_without_survivors_a_hang_ends_the_round() -> None:
    assert node(elastic=()).hangs("the job hung", 7, 1.0).actions[0] == SignalWorkers((0, 1, 2), 15)


def test_a_node_without_workers_looks_after_the_others() -> None:
    state = NodeState(shutdown_timeout_s=30.0)
    state.started(4, range(3, 3))
    assert state.hangs("the job hung", 1, 1.0).actions == (EndElsewhere(1, 4, "the job hung"),)


def test_the_order_to_end_a_rank() -> None:
    state = node()
    notice, signal = state.end_rank(1, 4, "the job hung").actions
    assert notice == Notice("killing rank 1, as the job hung; the others continue")
    assert signal == SignalWorkers((1,), 9)
    assert state.end_rank(1, 3, "the job hung").actions == (), "that round is over"
    assert state.end_rank(7, 4, "the job hung").actions == (), "it is on another node"
    assert kept().end_rank(2, 4, "the job hung").actions == ()


@pytest.mark.parametrize(
    ("decide", "why"),
    [
        (NodeState.contact_lost, "others could not reach it"),
        (NodeState.calls_timed_out, "others waited for it longer than their group's timeout"),
    ],
)
def test_ranks_at_fault_are_killed(
    decide: Callable[[NodeState, list[int]], NodeDecision], why: str
) -> None:
    notice, signal, elsewhere = decide(node(), [2, 5]).actions
    assert notice == Notice(f"killing rank 2, as {why}; the others continue")
    assert signal == SignalWorkers((2,), 9)
    assert elsewhere == EndElsewhere(5, 4, why)
    (told,) = decide(node(), []).actions
    assert isinstance(told, Tell)
    assert told.report.broken, "nobody is: all form a new round"
    assert decide(kept(), []).actions == ()


# Places.


def worker(local_rank: int, *, is_ready: bool = False) -> SimpleNamespace:
    report = WorkerReport(Stage.READY if is_ready else Stage.SPARE)
    return SimpleNamespace(local_rank=local_rank, report=report)


@pytest.mark.parametrize(
    ("kept", "standby", "size", "local_ranks"),
    [
        ([0, 2, 3], [], 3, [0, 2, 3]),
        ([0, 2, 3], [4], 4, [0, 1, 2, 3]),  # a spare takes the empty place
        ([0, 3], [1, 4], 4, [0, 1, 2, 3]),  # a replacement takes its own
        ([0, 3], [4], 3, [0, 1, 3]),
        ([3], [], 3, [3]),  # two more were lost meanwhile
        ([0, 1, 2], [3], 3, [0, 1, 2]),  # nobody has told of the one that is ready
        ([], [1], 1, [1]),
    ],
)
def test_places(kept: list[int], standby: list[int], size: int, local_ranks: list[int]) -> None:
    job = Job(command=("train.py",), local_world_size=4, spares=1, run_id="x", host="h", environ={})
    workers = LocalWorkers(job, selectors.DefaultSelector(), lambda _: None)
    workers.standbys = [worker(each, is_ready=True) for each in standby]  # type: ignore[misc]
    workers.standbys.append(worker(9))  # type: ignore[arg-type]  # still importing
    seat = Seat(
        number=5,
        store=Endpoint(host="h", port=1),
        node_rank=0,
        nodes=1,
        local_world_size=size,
        first_rank=10,
        world_size=20,
        first_role_rank=0,
        role_world_size=20,
    )
    survivors = [worker(each) for each in kept]
    places = workers.places_for(seat, survivors)  # type: ignore[arg-type]
    assert [place.local_rank for place, _ in places] == local_ranks
    assert [place.rank for place, _ in places] == [10 + i for i in range(len(local_ranks))]
    for place, taken in places:
        if place.local_rank in kept:
            assert taken.local_rank == place.local_rank
        else:
            assert taken.report.stage is Stage.READY


# Answers.


def workers_of(*seated: SimpleNamespace) -> LocalWorkers:
    job = Job(command=("train.py",), local_world_size=4, run_id="x", host="h", environ={})
    workers = LocalWorkers(job, selectors.DefaultSelector(), lambda _: None)
    workers.by_rank = dict(enumerate(seated))  # type: ignore[arg-type]
    return workers


def answered(
    number: int, stage: Stage = Stage.ASSIGNED, *, answer_by: float = 10.0, rank: int = 0
) -> SimpleNamespace:
    return SimpleNamespace(
        rank=rank,
        report=WorkerReport(stage, number),
        answer_by=answer_by,
        is_stopped=False,
        take=lambda *_, **__: None,
    )


def test_a_newcomer_may_take_its_time_to_build_its_state() -> None:
    """It knows its place, and is not elastic yet."""
    workers = workers_of(answered(5, Stage.JOINED), answered(5))
    assert workers.unanswered(5, 10.0) == []
    assert workers.wake_at is None


def test_who_does_not_answer_is_killed() -> None:
    silent, left = answered(4, Stage.JOINED), answered(4, Stage.LEFT)
    workers = workers_of(answered(5), silent, left, answered(5, Stage.LEFT))
    assert workers.unanswered(5, 9.0) == []
    assert workers.unanswered(5, 10.0) == [silent, left]
    assert workers.wake_at is None


@pytest.mark.parametrize("is_urgent", [False, True])
def test_who_is_silent_gets_no_more_time_by_another_round(is_urgent: bool) -> None:
    """As when a newcomer's round begins while a stopped rank is waited for."""
    silent, other = answered(4, Stage.JOINED), answered(5, Stage.JOINED)
    workers = workers_of(silent, other)
    other.answer_by = None
    places = [(SimpleNamespace(rank=rank), each) for rank, each in enumerate((silent, other))]
    workers.go_on(None, places, is_urgent=is_urgent, now=7.0)  # type: ignore[arg-type]
    other.report = WorkerReport(Stage.ASSIGNED, 6)
    assert workers.wake_at == 10.0
    assert workers.unanswered(6, 10.0) == [silent]
    assert workers.unanswered(6, 30.0) == []


def test_who_is_stopped_must_come_to_the_next_round_within_the_time() -> None:
    """Although nobody was lost, and even if it knew its place before it was stopped."""
    other, stopped = answered(4, Stage.JOINED), answered(4, Stage.JOINED)
    workers = workers_of(other, stopped)
    other.answer_by = stopped.answer_by = None
    workers.stopped(stopped, 4, 1.0)  # type: ignore[arg-type] # in a round that has formed
    assert stopped.answer_by is None
    places = [(SimpleNamespace(rank=rank), each) for rank, each in enumerate((other, stopped))]
    workers.go_on(None, places, is_urgent=False, now=7.0)  # type: ignore[arg-type]
    assert other.answer_by is None
    assert workers.unanswered(5, 16.9) == []
    stopped.report = WorkerReport(Stage.ASSIGNED, 5)
    assert workers.unanswered(5, 17.0) == [stopped]
    stopped.answer_by = 20.0
    stopped.is_stopped = False
    assert workers.unanswered(5, 20.0) == []


def test_a_newcomer_that_is_stopped_is_waited_for() -> None:
    """Nobody needs it yet."""
    newcomer = answered(-1, Stage.READY, rank=-1)
    workers = workers_of(newcomer)
    newcomer.answer_by = None
    workers.stopped(newcomer, 5, 1.0)  # type: ignore[arg-type]
    assert (newcomer.is_stopped, newcomer.answer_by) == (True, None)


def test_nobody_joins_those_that_have_done_their_last_update() -> None:
    """A worker on standby that gets ready as the others leave must not have all begin again."""
    state = node()
    state.worker_exited(killed(1), 1.0)
    state.round_stopped(Stop(round=4, because="rank 1 failed"), 1.0)
    state.started(5, range(2), elastic=(0, 1))
    (told,) = state.workers_ready(1).actions
    assert isinstance(told, Tell)
    assert (told.report.ready, told.report.is_finishing) == (1, False)
    (told,) = state.worker_is_elastic(0, is_on=False).actions
    assert isinstance(told, Tell)
    assert (told.report.ready, told.report.is_finishing) == (1, True)
    assert not state.worker_is_elastic(1, is_on=False).actions
    # Others had been admitted before that was known.
    admits = Stop(round=5, because="x joined", ending=Ending.ADMIT)
    assert not state.round_stopped(admits, 3.0).actions
    assert state.phase is Phase.RUNNING
    assert state.round_stopped(Stop(round=5, because="node 1 was lost"), 3.0).actions
