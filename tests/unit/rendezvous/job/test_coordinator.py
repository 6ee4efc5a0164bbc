"""What comes after a round, as a table; and stories of jobs of several nodes.

    EVENT -> STAGE: ACTIONS

Events: `join 1`, `broken 1`, `ended 1` (all succeeded there), `ended 1 failed` (and `early`, `echo`
or `stuck`), `lost 1`, `stop 0`, `tick 10`.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rallypoint.base.record import Record
from rallypoint.rendezvous.job.coordinator import (
    BATCH_S,
    Coordinator,
    JobDecision,
    JobStage,
    OpenRound,
    next_notice,
)
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.reports import (
    Ending,
    Finish,
    NodeReport,
    Notice,
    Outcome,
    RankFailure,
    Refuse,
    Stop,
)
from rallypoint.rendezvous.job.restart_policy import RoundEnd, judge
from rallypoint.rendezvous.job.round import Member

FAILED = RankFailure(rank=1, node_rank=0, text="rank 1 failed")
ECHO = RankFailure(rank=0, node_rank=0, text="rank 0 lost rank 1", is_secondary=True)
EARLY = RankFailure(rank=2, node_rank=0, text="rank 2 cannot import", is_startup=True)
NEWCOMER = FAILED.__replace__(is_newcomer=True)


def end(number: int, **how: object) -> NodeReport:
    """The round is over on a node."""
    return NodeReport(round=number, has_begun=True, is_over=True, **how)  # type: ignore[arg-type]


def running(number: int, **how: object) -> NodeReport:
    """It runs there."""
    return NodeReport(round=number, has_begun=True, is_over=False, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "then", "why"),
    [
        (RoundEnd(succeeded=True), Outcome.SUCCEEDED, "every worker succeeded"),
        (
            RoundEnd(succeeded=True, stop_asked="SIGINT"),
            Outcome.SUCCEEDED,
            "every worker succeeded",
        ),
        (RoundEnd(causes=(FAILED,)), Outcome.GIVEN_UP, "set --max-restarts"),
        (RoundEnd(causes=(FAILED,), max_restarts=2), "restart", "restart 1 of 2"),
        (RoundEnd(causes=(FAILED,), max_restarts=2, restarts_used=1), "restart", "2 of 2"),
        (RoundEnd(causes=(FAILED,), max_restarts=2, restarts_used=2), Outcome.GIVEN_UP, "all 2"),
        (
            RoundEnd(causes=(EARLY, FAILED), max_restarts=2),
            Outcome.GIVEN_UP,
            "would fail in the same way",
        ),
        (
            RoundEnd(causes=(ECHO, EARLY), max_restarts=2),
            Outcome.GIVEN_UP,
            "would fail in the same way",
        ),
        (RoundEnd(causes=(ECHO,), max_restarts=2), "restart", "restart 1 of 2"),
        (RoundEnd(max_restarts=2, survivors=4), "resize", "no node was lost"),
        (RoundEnd(max_restarts=2), Outcome.GIVEN_UP, "unknown reason"),
        (
            RoundEnd(causes=(FAILED,), max_restarts=2, stop_asked="SIGTERM"),
            Outcome.STOPPED,
            "SIGTERM",
        ),
        (RoundEnd(causes=(FAILED,), stop_asked="SIGTERM"), Outcome.GIVEN_UP, "no restarts"),
        (
            RoundEnd(causes=(ECHO,), stop_asked="SIGTERM", was_whole=True),
            Outcome.STOPPED,
            "SIGTERM",
        ),
        (RoundEnd(causes=(ECHO,), stop_asked="SIGTERM"), Outcome.GIVEN_UP, "no restarts"),
        (RoundEnd(stop_asked="SIGTERM"), Outcome.STOPPED, "SIGTERM"),
        (RoundEnd(causes=(FAILED,), max_restarts=2, unkillable=1), Outcome.GIVEN_UP, "killed"),
        (
            RoundEnd(causes=(ECHO,), nodes_left=2, nodes_lost=("node 2",), min_nodes=2),
            "resize",
            "node 2 lost; the others continue",
        ),
        (
            RoundEnd(
                causes=(ECHO,),
                nodes_left=1,
                nodes_lost=("node 0", "node 2"),
                min_nodes=2,
                max_restarts=2,
            ),
            Outcome.GIVEN_UP,
            "node 0, node 2 lost, 1 left, 2 needed",
        ),
        (RoundEnd(), Outcome.GIVEN_UP, "for an unknown reason"),
    ],
)
def test_what_comes_after_a_round(end: RoundEnd, then: Outcome | str, why: str) -> None:
    verdict = judge(end)
    assert (verdict.outcome or ("restart" if verdict.is_restart else "resize")) == then
    assert why in verdict.reason


STORIES = {
    "two nodes succeed": """
        join 1 -> gathering: nothing
        join 0 -> running: open round 0 of 0 1
        ended 1 -> running: nothing
        ended 0 -> done: succeeded
    """,
    "a failure anywhere is one restart for all": """
        join 0 -> gathering: nothing
        join 1 -> running: open round 0 of 0 1
        broken 1 -> stopping: stop round 0
        broken 0 -> stopping: nothing
        ended 0 echo -> stopping: nothing
        ended 1 failed -> running: open round 1 of 0 1
        ended 0 -> running: nothing
        ended 1 failed -> running: stop round 1; open round 2 of 0 1
        ended 1 failed -> stopping: stop round 2
        ended 0 echo -> done: given up, node 1
    """,
    "what one node has finished is done again when another fails": """
        join 0 -> gathering: nothing
        join 1 -> running: open round 0 of 0 1
        ended 0 -> running: nothing
        broken 1 -> stopping: stop round 0
        ended 1 failed -> running: open round 1 of 0 1
        ended 1 -> running: nothing
        ended 0 -> done: succeeded
    """,
    "a report of an old round is none": """
        join 0 -> gathering: nothing
        join 1 -> running: open round 0 of 0 1
        broken 1 -> stopping: stop round 0
        ended 0 -> stopping: nothing
        ended 1 failed -> running: open round 1 of 0 1
        old 0 -> running: nothing
        ended 0 -> running: nothing
        old 1 -> running: nothing
        ended 1 -> done: succeeded
    """,
    "a lost node ends a job of fixed nodes": """
        join 0 -> gathering: nothing
        join 1 -> running: open round 0 of 0 1
        lost 1 -> stopping: stop round 0
        ended 0 echo -> done: given up, node 0
    """,
    "the last node is lost after the others have finished": """
        join 0 -> gathering: nothing
        join 1 -> running: open round 0 of 0 1
        ended 0 -> running: nothing
        lost 1 -> done: stop round 0; given up
    """,
    "a node that has finished may go": """
        join 0 -> gathering: nothing
        join 1 -> running: open round 0 of 0 1
        ended 1 -> running: nothing
        lost 1 -> running: nothing
        ended 0 -> done: succeeded
    """,
    "a node that has finished and gone is missed in the next round": """
        join 0 -> gathering: nothing
        join 1 -> running: open round 0 of 0 1
        ended 1 -> running: nothing
        lost 1 -> running: nothing
        ended 0 failed -> done: stop round 0; given up, node 0
    """,
    "a stop on one node stops all": """
        join 0 -> gathering: nothing
        join 1 -> running: open round 0 of 0 1
        stop 1 -> stopping: stop round 0
        ended 1 stopped -> stopping: nothing
        ended 0 stopped -> done: stopped
    """,
    "who is missing is told after ten seconds": """
        join 0 -> gathering: nothing
        tick 9 -> gathering: nothing
        tick 10 -> gathering: '1/2 nodes joined; missing node-rank 1'
        tick 11 -> gathering: nothing
        lost 0 -> gathering: nothing
        tick 20 -> gathering: nothing
        tick 25 -> done: given up
        join 1 -> done: refuse 1: the job is over
    """,
    "a stop while gathering": """
        join 0 -> gathering: nothing
        stop 0 -> done: stopped
    """,
    "what cannot be killed forbids a new round": """
        join 0 -> gathering: nothing
        join 1 -> running: open round 0 of 0 1
        ended 0 stuck -> stopping: stop round 0
        ended 1 stopped -> done: given up, node 0
    """,
}


def test_who_is_missing_is_told_more_and_more_seldom() -> None:
    job = Coordinator(Limits(min_nodes=2, max_nodes=2, join_timeout_s=600.0), max_restarts=0)
    job.opened(1000.0)
    told = [at for at in range(600) if job.tick(1000.0 + at).actions]
    assert told == [10, 30, 60, 120, 240, 480]
    assert [next_notice(5.0, 5.0 + waited_s) for waited_s in (0, 9.9, 10, 119, 480, 5000)] == [
        *(15, 15, 35, 125, 965, 7685)
    ]


def test_a_notice_is_always_later_than_now(seed: int) -> None:
    """By rounding, less than 10 s may have passed at the time that is 10 s later."""
    chance = random.Random(seed)
    for _ in range(1000):
        began = now = chance.random() * 10 ** chance.randint(-3, 9)
        for _ in range(8):
            now, before = next_notice(began, now), now
            assert now > before


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_story(story: str) -> None:
    limits = Limits(min_nodes=2, max_nodes=2, join_timeout_s=25.0, is_fixed=True)
    job = Coordinator(limits, max_restarts=2)
    job.opened(0.0)
    for line in filter(None, map(str.strip, story.splitlines())):
        event = line.partition(" -> ")[0]
        decision = happen(job, event)
        shown = "; ".join(map(show, decision.actions)) or "nothing"
        assert f"{event} -> {job.stage.value}: {shown}" == line


ELASTIC = {
    "a node that comes later makes a new round, free of charge": """
        join 0 -> gathering: nothing
        join 1 -> gathering: nothing
        tick 3 -> running: open round 0 of 0 1
        join 2 -> stopping: stop round 0
        ended 0 stopped -> stopping: nothing
        ended 1 stopped -> running: open round 1 of 0 1 2
        join 3 -> running: nothing
        lost 3 -> running: nothing
        ended 0 -> running: nothing
        ended 1 -> running: nothing
        ended 2 -> done: succeeded
    """,
    "a node that comes and leaves again before the round has ended is no failure": """
        join 0 -> gathering: nothing
        join 1 -> gathering: nothing
        tick 3 -> running: open round 0 of 0 1
        join 2 -> stopping: stop round 0
        leave 2 -> stopping: nothing
        ended 0 stopped -> stopping: nothing
        ended 1 stopped -> running: open round 1 of 0 1
    """,
    "a lost node makes a new round, free of charge, also with its echoes": """
        join 0 -> gathering: nothing
        join 1 -> gathering: nothing
        join 2 -> running: open round 0 of 0 1 2
        ended 0 echo -> stopping: stop round 0
        lost 2 -> stopping: nothing
        ended 1 echo -> running: open round 1 of 0 1
        ended 1 -> running: nothing
        ended 0 -> done: succeeded
    """,
    "too few are left: the rest waits, and says so, until the time is over": """
        join 0 -> gathering: nothing
        join 1 -> gathering: nothing
        tick 3 -> running: open round 0 of 0 1
        lost 0 -> stopping: stop round 0
        ended 1 echo -> gathering: notice
        tick 10 -> gathering: notice
        tick 24 -> gathering: nothing
        tick 25 -> done: given up
    """,
    "a replacement takes the free place": """
        join 0 -> gathering: nothing
        join 1 -> gathering: nothing
        tick 3 -> running: open round 0 of 0 1
        lost 0 -> stopping: stop round 0
        join 5 -> stopping: nothing
        ended 1 echo -> running: open round 1 of 5 1
        ended 5 -> running: nothing
        ended 1 -> done: succeeded
    """,
    "who is too many waits for a place": """
        join 0 -> gathering: nothing
        join 1 -> gathering: nothing
        join 2 -> running: open round 0 of 0 1 2
        join 3 -> running: nothing
        leave 1 -> stopping: stop round 0
        ended 0 stopped -> stopping: nothing
        ended 2 stopped -> stopping: nothing
        ended 1 stopped -> running: open round 1 of 0 3 2
    """,
    "failures are charged": """
        join 0 -> gathering: nothing
        join 1 -> gathering: nothing
        tick 3 -> running: open round 0 of 0 1
        broken 1 -> stopping: stop round 0
        ended 0 stopped -> stopping: nothing
        ended 1 failed -> running: open round 1 of 0 1
        ended 1 failed -> stopping: stop round 1
        ended 0 stopped -> running: open round 2 of 0 1
        ended 1 failed -> stopping: stop round 2
        ended 0 stopped -> done: given up, node 1
    """,
    "a failure before a node comes is charged": """
        join 0 -> gathering: nothing
        join 1 -> gathering: nothing
        tick 3 -> running: open round 0 of 0 1
        broken 1 -> stopping: stop round 0
        join 2 -> stopping: nothing
        ended 0 stopped -> stopping: nothing
        ended 1 failed -> running: open round 1 of 0 1 2
    """,
    "an early end is not lost when the others go on without that node": """
        join 0 -> gathering: nothing
        join 1 -> gathering: nothing
        join 2 -> running: open round 0 of 0 1 2
        ended 2 -> running: nothing
        lost 2 -> running: nothing
        ended 0 -> running: nothing
        ended 1 -> done: succeeded
    """,
}


@pytest.mark.parametrize("story", ELASTIC.values(), ids=ELASTIC.keys())
def test_elastic_story(story: str) -> None:
    job = Coordinator(Limits(min_nodes=2, max_nodes=3, join_timeout_s=25.0), max_restarts=2)
    job.opened(0.0)
    for line in filter(None, map(str.strip, story.splitlines())):
        event = line.partition(" -> ")[0]
        decision = happen(job, event, wishes=False)
        shown = "; ".join(map(show, decision.actions)) or "nothing"
        assert f"{event} -> {job.stage.value}: {shown}" == line


def happen(job: Coordinator, event: str, *, wishes: bool = True) -> JobDecision:  # noqa: PLR0911
    what, number, *how = event.split()
    node = int(number)
    match what:
        case "join":
            wish = node if wishes else None
            member = Member(key=number, wish=wish, host=f"h{node}", local_world_size=1)
            return job.joined(member, 0.0)
        case "broken":
            return job.reported(number, running(job.round, broken="rank x failed"), 0.0)
        case "ended":
            cause = {"failed": FAILED, "echo": ECHO, "early": EARLY, "stuck": FAILED}.get(
                "".join(how)
            )
            causes = () if cause is None else (cause.__replace__(node_rank=node),)
            over = end(job.round, succeeded=not how, causes=causes, unkillable="stuck" in how)
            return job.reported(number, over, 0.0)
        case "old":
            return job.reported(number, end(max(job.round - 1, -1), succeeded=True), 0.0)
        case "leave":
            return job.reported(number, NodeReport(leaves="SIGTERM stopped it"), 0.0)
        case "lost":
            return job.node_lost(number, "its connection closed", 0.0)
        case "stop":
            asked = NodeReport(stop_asked=f"SIGTERM stopped node {node}")
            return job.reported(number, asked, 0.0)
        case "tick":
            return job.tick(float(number))
    raise AssertionError(event)


def show(action: Record) -> str:
    match action:
        case OpenRound(number=number, members=members):
            return f"open round {number} of {' '.join(m.key for m in members)}"
        case Stop(round=number):
            return f"stop round {number}"
        case Finish(outcome=outcome, culprit=culprit):
            return outcome.value + ("" if culprit is None else f", node {culprit}")
        case Notice(text):
            return repr(text) if "node-rank" in text else "notice"
        case Refuse(key, why):
            return f"refuse {key}: {why}"
    raise AssertionError(action)


WORDS = st.sampled_from(
    [f"{what} {node}" for node in range(3) for what in ("join", "broken", "ended", "old", "lost")]
    + [f"ended {node} {how}" for node in range(3) for how in ("failed", "echo", "stuck")]
    + ["ended 0 early", "stop 1", "tick 10"]
)


@given(events=st.lists(WORDS, max_size=40), max_restarts=st.integers(0, 3))
def test_rounds_only_grow_and_are_charged_once(events: list[str], max_restarts: int) -> None:
    job = Coordinator(Limits(min_nodes=3, max_nodes=3, is_fixed=True), max_restarts)
    job.opened(0.0)
    actions: list[Record] = []
    for event in events:
        actions += happen(job, event).actions
    opened = [action.number for action in actions if isinstance(action, OpenRound)]
    assert opened == list(range(len(opened)))
    assert len(opened) <= 1 + max_restarts
    stopped = [action.round for action in actions if isinstance(action, Stop)]
    assert len(set(stopped)) == len(stopped)
    finishes = [action for action in actions if isinstance(action, Finish)]
    assert len(finishes) == (job.stage is JobStage.DONE)
    if finishes and finishes[0].outcome is Outcome.SUCCEEDED:
        last = max(i for i, action in enumerate(actions) if isinstance(action, OpenRound))
        assert not any(isinstance(action, Stop) for action in actions[last:])


COMINGS = st.sampled_from(
    [f"{what} {node}" for node in range(5) for what in ("join", "leave", "lost", "broken", "ended")]
    + [f"ended {node} {how}" for node in range(5) for how in ("failed", "echo", "stopped")]
    + ["tick 3", "tick 10", "tick 30"]
)


@given(events=st.lists(COMINGS, max_size=60), max_restarts=st.integers(0, 2))
@example(  # who leaves had succeeded when the others lost a node
    events=["join 0", "join 2", "join 4", "leave 4", "ended 4", "ended 2 failed", "lost 0"],
    max_restarts=0,
)
def test_members_may_come_and_go_in_any_order(events: list[str], max_restarts: int) -> None:
    """Against what a bystander can tell: who is here, and who has not yet ended."""
    job = Coordinator(Limits(min_nodes=2, max_nodes=3, join_timeout_s=25.0), max_restarts)
    job.opened(0.0)
    here: set[str] = set()
    running: set[str] = set()  # have a round's workers, and have not said that they ended
    leaving: set[str] = set()  # and leave as soon as these have ended
    number = -1
    for event in events:
        what, node, *_ = event.split()
        if what == "join" and node in leaving:
            continue
        is_over = job.stage is JobStage.DONE
        actions = happen(job, event, wishes=False).actions
        if what == "join" and not is_over:
            here.add(node)
        if what == "leave" and node in running:
            leaving.add(node)
        if what in ("lost", "ended"):
            leaving.discard(node)
        if what in ("leave", "lost"):
            here.discard(node)
            running.discard(node)
        if what == "ended":
            running.discard(node)
        for action in actions:
            assert not is_over or isinstance(action, Refuse)
            match action:
                case OpenRound():
                    assert action.number == number + 1
                    number = action.number
                    keys = [member.key for member in action.members]
                    assert running == set()  # nobody's old workers are left
                    assert set(keys) <= here
                    assert 2 <= len(keys) <= 3
                    assert len(keys) == min(3, len(here))
                    assert [member.node_rank for member in action.members] == [*range(len(keys))]
                    running = set(keys)
                case Finish(outcome=Outcome.SUCCEEDED):
                    assert running == set()
    assert job.restarts <= max_restarts


class Flapping:
    """Two nodes that stay, and one that comes and goes, against one coordinator; by hand."""

    def __init__(self, max_nodes: int = 4) -> None:
        limits = Limits(min_nodes=2, max_nodes=max_nodes, last_call_s=0.0)
        self.job = Coordinator(limits, max_restarts=0)
        self.now = 0.0
        self.rounds = 0
        self.notices: list[str] = []
        self.job.opened(self.now)
        for key in ("a", "b"):
            self.join(key)
        self.tick()

    def join(self, key: str) -> None:
        self.take(self.job.joined(Member(key=key, host=key, local_world_size=1), self.now))

    def lose(self, key: str) -> None:
        self.take(self.job.node_lost(key, "it died", self.now))

    def tick(self) -> None:
        self.take(self.job.tick(self.now))

    def wait(self, seconds: float) -> None:
        """In steps, so that every alarm is met."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.tick()

    def take(self, decision: JobDecision) -> None:
        for action in decision.actions:
            if isinstance(action, Notice):
                self.notices.append(action.text)
            elif isinstance(action, OpenRound):
                self.rounds += 1
            elif isinstance(action, Stop):
                for member in self.job.current.members:
                    if member.key in self.job.gathering.here:
                        self.take(self.job.reported(member.key, end(action.round), self.now))

    def running(self) -> str:
        return "".join(sorted(member.key for member in self.job.current.members))


def test_a_node_that_dies_every_second_does_not_stop_the_others() -> None:
    cluster = Flapping()
    for number in range(60):
        cluster.join(f"c{number}")
        cluster.wait(1)
        cluster.lose(f"c{number}")
    assert cluster.rounds <= 12  # without pauses 121
    assert cluster.running() == "ab"
    assert len([text for text in cluster.notices if "so new nodes" in text]) == 1


def test_newcomers_after_many_changes_come_in_together() -> None:
    cluster = Flapping()
    for number in range(3):
        cluster.join(f"c{number}")
        cluster.wait(1)
        cluster.lose(f"c{number}")
    before = cluster.rounds
    cluster.join("d")
    cluster.wait(0.5)
    cluster.join("e")
    assert cluster.running() == "ab"
    cluster.wait(10)
    assert cluster.running() == "abde"
    assert cluster.rounds == before + 1
    cluster.lose("e")
    cluster.wait(400)  # quiet again: no pause
    cluster.join("f")
    assert cluster.running() == "abdf"


def test_many_nodes_lost_at_once_are_one_change() -> None:
    cluster = Flapping(max_nodes=40)
    for number in range(30):
        cluster.join(f"c{number}")
    cluster.wait(400)
    for number in range(30):
        cluster.lose(f"c{number}")
    assert cluster.running() == "ab"
    cluster.wait(0.25)
    cluster.join("d")  # comes in at once
    assert cluster.running() == "abd"


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("ends", ["ab", "ba"])
def test_the_node_that_told_first_is_the_culprit(first: str, ends: str) -> None:
    """Whoever's workers have ended first: the hosts' clocks say nothing."""
    job, other = two_nodes(), "ab".replace(first, "")
    job.reported(first, running(0, broken="out of memory"), 1.0)
    job.reported(other, running(0, broken="connection closed by peer"), 1.001)
    causes = {
        first: FAILED.__replace__(rank=5, node_rank="ab".index(first), text="out of memory"),
        other: FAILED.__replace__(node_rank="ab".index(other), text="connection closed by peer"),
    }
    for key in ends:
        decision = job.reported(key, end(0, causes=(ECHO, causes[key])), 2.0)
    (finish,) = [each for each in decision.actions if isinstance(each, Finish)]
    assert (finish.culprit, finish.what) == ("ab".index(first), "out of memory")


# Workers that go on when others are lost.


def two_nodes(max_restarts: int = 0) -> Coordinator:
    job = Coordinator(Limits(min_nodes=1, max_nodes=2), max_restarts)
    job.opened(0.0)
    for key in "ab":
        decision = job.joined(Member(key=key, host=f"h{key}", local_world_size=2), 0.0)
    assert isinstance(decision.actions[0], OpenRound)
    return job


def opened(decision: JobDecision) -> OpenRound:
    return next(each for each in decision.actions if isinstance(each, OpenRound))


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_the_next_round_has_the_survivors(max_restarts: int) -> None:
    job = two_nodes(max_restarts)
    broken = running(0, broken="rank 1 failed")
    assert isinstance(job.reported("a", broken, 1.0).actions[0], Stop)
    job.reported("a", end(0, causes=(FAILED,), survivors=1), 1.0)
    action = opened(job.reported("b", end(0, survivors=2), 1.0))
    assert [member.size for member in action.members] == [1, 2]
    assert (action.is_urgent, action.may_replace) == (True, max_restarts == 1)
    assert job.restarts == max_restarts


def test_who_ended_before_the_next_round_is_charged_once() -> None:
    job = two_nodes(max_restarts=1)
    job.reported("a", running(0, broken="rank 1 failed"), 1.0)
    job.reported("a", end(0, causes=(FAILED,)), 1.0)
    opened(job.reported("b", end(0, survivors=2), 1.0))
    missed = FAILED.__replace__(is_charged=True)
    job.reported("b", end(1, causes=(missed, missed)), 1.1)
    again = opened(job.reported("a", end(1), 1.1))
    assert [member.taking_part for member in again.members] == [-1, -1]
    assert job.restarts == 1
    job.reported("b", end(2, causes=(FAILED,)), 2.0)
    (finish,) = job.reported("a", end(2), 2.0).actions
    assert isinstance(finish, Finish)


def test_survivors_that_are_lost_before_the_next_round_are_not_counted() -> None:
    """Otherwise a round of no ranks would begin."""
    job = Coordinator(Limits(min_nodes=3, max_nodes=3), 1)
    job.opened(0.0)
    for key in "abc":
        job.joined(Member(key=key, host=f"h{key}", local_world_size=2), 0.0)
    job.node_lost("c", "its connection closed", 1.0)
    job.reported("a", end(0), 1.0)
    job.reported("b", end(0, survivors=2), 1.0)
    job.node_lost("b", "its connection closed", 2.0)
    job.joined(Member(key="d", host="hd", local_world_size=2), 3.0)
    again = opened(job.joined(Member(key="e", host="he", local_world_size=2), 3.0))
    assert [member.size for member in again.members] == [2, 2, 2]


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_workers_that_are_lost_with_a_node_are_replaced(max_restarts: int) -> None:
    job = two_nodes(max_restarts)
    job.reported("a", running(0, broken="rank 1 failed"), 1.0)
    job.reported("a", end(0, causes=(FAILED,), survivors=1), 1.0)
    action = opened(job.node_lost("b", "its connection closed", 1.0))
    assert [member.size for member in action.members] == [1]
    assert action.may_replace == (max_restarts == 1)
    assert job.restarts == 0


def test_if_only_contact_was_lost_all_go_on_at_once() -> None:
    job = two_nodes(max_restarts=1)
    job.reported("b", running(0, broken="connections broke"), 1.0)
    job.reported("a", end(0, survivors=2), 1.0)
    action = opened(job.reported("b", end(0, survivors=2), 1.0))
    assert [member.size for member in action.members] == [2, 2]
    assert (action.is_urgent, action.may_replace) == (True, True)
    assert job.restarts == 0


def test_who_was_to_be_replaced_in_a_round_that_never_began() -> None:
    """Another node was lost before, so there is one more round, and the place is empty still."""
    job = two_nodes(max_restarts=1)
    job.reported("a", running(0, broken="rank 1 failed"), 1.0)
    job.reported("a", end(0, causes=(FAILED,), survivors=1), 1.0)
    assert opened(job.reported("b", end(0, survivors=2), 1.0)).may_replace
    job.node_lost("b", "its connection closed", 1.1)
    assert not opened(
        job.reported("a", end(1, survivors=1), 1.2)
    ).may_replace  # charged: none is left
    job = two_nodes(max_restarts=2)
    job.reported("a", running(0, broken="rank 1 failed"), 1.0)
    job.reported("a", end(0, causes=(FAILED,), survivors=1), 1.0)
    opened(job.reported("b", end(0, survivors=2), 1.0))
    job.node_lost("b", "its connection closed", 1.1)
    assert opened(job.reported("a", end(1, survivors=1), 1.2)).may_replace


def test_the_first_report_of_a_node_without_ranks_was_lost() -> None:
    """The next one says at once that its workers are ready."""
    job = two_nodes(max_restarts=1)
    job.reported("a", running(0, broken="connections broke"), 1.0)
    job.reported("b", end(0), 1.0)
    opened(job.reported("a", end(0, survivors=2), 1.0))
    job.reported("b", end(1, succeeded=True, ready=2), 5.0)
    assert (job.wake_at, job.stage) == (None, JobStage.STOPPING)


def test_a_node_without_ranks_may_come_back() -> None:
    job = two_nodes(max_restarts=1)
    job.reported("a", running(0, broken="connections broke"), 1.0)
    job.reported("b", end(0), 1.0)
    assert [each.size for each in opened(job.reported("a", end(0, survivors=2), 1.0)).members] == [
        2,
        0,
    ]
    job.reported("b", end(1, succeeded=True), 1.1)
    assert not job.node_lost("b", "it fell silent", 2.0).actions
    decision = job.joined(Member(key="b", host="hb", local_world_size=2), 3.0)
    assert decision.actions == (Stop(round=1, because="hb joined", ending=Ending.ADMIT),)


def test_a_node_without_ranks_that_nobody_can_replace_is_missed() -> None:
    job = Coordinator(Limits(min_nodes=2, max_nodes=2, is_fixed=True), 1)
    job.opened(0.0)
    for rank, key in enumerate("ab"):
        job.joined(Member(key=key, host=f"h{key}", local_world_size=2, wish=rank), 0.0)
    job.reported("a", running(0, broken="connections broke"), 1.0)
    job.reported("b", end(0), 1.0)
    opened(job.reported("a", end(0, survivors=2), 1.0))
    job.reported("b", end(1, succeeded=True), 1.1)
    (stop,) = job.node_lost("b", "it fell silent", 2.0).actions
    assert isinstance(stop, Stop)
    (finish,) = job.reported("a", end(1, survivors=2), 2.1).actions
    assert isinstance(finish, Finish)
    assert finish.outcome is Outcome.GIVEN_UP


def test_a_worker_that_gets_ready_joins() -> None:
    job = two_nodes(max_restarts=1)
    job.reported("a", running(0, broken="rank 1 failed"), 1.0)
    job.reported("a", end(0, causes=(FAILED,), survivors=1), 1.0)
    job.reported("b", end(0, survivors=2), 1.0)
    (stop,) = job.reported("a", running(1, ready=1), 2.0).actions
    assert isinstance(stop, Stop)
    job.reported("a", end(1, survivors=1, ready=1), 2.0)
    action = opened(job.reported("b", end(1, survivors=2), 2.0))
    assert [member.size for member in action.members] == [2, 2]
    assert not action.is_urgent
    assert job.restarts == 1


def sizes(decision: JobDecision) -> list[int]:
    return [member.size for member in opened(decision).members]


def test_workers_that_get_ready_together_join_together() -> None:
    """One after the other, they cost the others one round."""
    job = two_nodes(max_restarts=1)
    job.reported("a", running(0, broken="rank 1 failed"), 1.0)
    job.reported("a", end(0, causes=(FAILED,), survivors=1), 1.0)
    job.reported("b", end(0, survivors=1), 1.0)
    assert job.reported("a", running(1, ready=1), 5.0).actions == ()
    assert job.wake_at == 5.0 + BATCH_S
    (stop,) = job.reported("b", running(1, ready=1), 5.25).actions
    assert isinstance(stop, Stop), "nobody else is waited for"
    job.reported("a", end(1, survivors=1, ready=1), 5.25)
    assert sizes(job.reported("b", end(1, survivors=1, ready=1), 5.25)) == [2, 2]


def test_who_does_not_get_ready_is_not_waited_for_long() -> None:
    job = two_nodes(max_restarts=1)
    job.reported("a", running(0, broken="rank 1 failed"), 1.0)
    job.reported("a", end(0, causes=(FAILED,), survivors=1), 1.0)
    job.reported("b", end(0, survivors=1), 1.0)
    job.reported("a", running(1, ready=1), 5.0)
    (stop,) = job.tick(5.0 + BATCH_S).actions
    assert stop == Stop(round=1, because="a worker of node 0 (ha) joined", ending=Ending.ADMIT)
    assert job.stopping == stop  # what is repeated, if it is lost
    job = two_nodes()
    job.reported("a", running(0, broken="rank 1 failed"), 1.0)
    job.reported("a", end(0, causes=(FAILED,), survivors=0), 1.0)
    job.reported("b", end(0, survivors=2), 1.0)
    job.reported("a", running(1, ready=1), 5.0)
    job.reported("a", running(1, ready=0), 5.1)  # it has died
    assert job.tick(5.0 + BATCH_S).actions == ()


def test_nobody_joins_when_the_last_update_is_done() -> None:
    """Neither workers on standby nor a new node; but if one fails, those are welcome."""
    job = Coordinator(Limits(min_nodes=2, max_nodes=3, last_call_s=0.0), max_restarts=1)
    job.opened(0.0)
    for key in ("a", "b"):
        job.joined(Member(key=key, host=f"h{key}", local_world_size=2), 0.0)
    job.reported("a", running(job.round, is_finishing=True), 1.0)
    assert not job.reported("b", running(job.round, ready=1), 2.0).actions
    assert not job.joined(Member(key="c", host="hc", local_world_size=2), 2.0).actions
    assert not job.tick(100.0).actions
    broken = running(job.round, broken="rank 1 failed")
    assert isinstance(job.reported("a", broken, 101.0).actions[0], Stop)
    for node_rank, key in enumerate("ab"):
        causes = () if node_rank else (FAILED,)
        last = job.reported(key, end(job.round, causes=causes), 101.0)
    assert len(opened(last).members) == 3


class ShortLived:
    """A worker goes on, and the other is replaced by one that dies a second after it has joined."""

    def __init__(self) -> None:
        self.job = Coordinator(Limits(), max_restarts=1000)
        self.job.opened(0.0)
        self.now = 0.0
        self.joined_at: list[float] = []
        self.notices: list[str] = []
        self.job.joined(Member(key="a", host="ha", local_world_size=2), 0.0)
        self.has_joined = False
        self.is_exact = False  # a clock that shows the time at which they are to join

    def run(self, until_s: float, *, lives_s: float = 1.0) -> None:
        died = self.end(causes=(FAILED,), survivors=1)
        while self.now < until_s:
            assert died.members[0].size == 1, "nobody was ready"
            self.join(died.number)
            self.now += lives_s
            died = self.end(causes=(NEWCOMER,), survivors=1)

    def join(self, number: int) -> None:
        self.take(self.job.reported("a", running(number, ready=1), self.now))
        while self.job.stage is JobStage.RUNNING:
            self.now = max(self.now, self.job.wake_at or 0.0) if self.is_exact else self.now + 0.25
            self.take(self.job.tick(self.now))
        assert self.end(survivors=1, ready=1).members[0].size == 2
        self.joined_at.append(self.now)

    def end(self, **how: object) -> OpenRound:
        return opened(self.job.reported("a", end(self.job.round, **how), self.now))

    def take(self, decision: JobDecision) -> None:
        self.notices += [each.text for each in decision.actions if isinstance(each, Notice)]


def test_newcomers_that_die_soon_join_less_and_less_often() -> None:
    job = ShortLived()
    job.run(300.0)
    assert len(job.joined_at) < 14  # without pauses 240
    assert job.joined_at[-1] - job.joined_at[-2] == 61.0
    assert "3 times in a row" in job.notices[0]
    assert len(job.notices) == len(job.joined_at) - 3


@pytest.mark.parametrize("seed", range(20))
def test_they_join_at_the_time_that_was_said(seed: int) -> None:
    """However the sum of times is rounded."""
    job = ShortLived()
    job.is_exact = True
    job.run(100.0, lives_s=random.Random(seed).uniform(1.0, 15.0))
    assert job.notices


def test_newcomers_that_live_on_join_at_once() -> None:
    job = ShortLived()
    job.run(300.0, lives_s=21.0)
    assert len(job.joined_at) == 15
    assert job.notices == []


def test_a_spare_that_is_to_wait_does_not_take_the_place_at_once() -> None:
    job = ShortLived()
    job.run(5.0)
    job.join(job.job.round)
    job.now += 1.0
    spare = job.end(causes=(NEWCOMER,), survivors=1, ready=1)
    assert spare.members[0].size == 1


def test_where_others_are_lost_too_newcomers_join_at_once() -> None:
    """Else places would stay empty while the rest are lost."""
    job = ShortLived()
    job.run(100.0)
    assert job.job.current.members[0].size == 1
    assert job.end(causes=(FAILED,), survivors=1, ready=1).members[0].size == 2


def test_a_node_that_has_nobody_waits_for_the_others() -> None:
    """It takes no part until a worker of its own is ready; the job succeeds without it."""
    job = two_nodes(max_restarts=1)
    job.reported("a", running(0, broken="rank 1 failed"), 1.0)
    job.reported("a", end(0, causes=(FAILED,)), 1.0)
    action = opened(job.reported("b", end(0, survivors=2), 1.0))
    assert [member.size for member in action.members] == [0, 2]
    nothing = end(1, succeeded=True)
    assert job.reported("a", nothing, 1.0).actions == ()
    (finish,) = job.reported("b", end(1, succeeded=True), 5.0).actions
    assert isinstance(finish, Finish)
    assert finish.outcome is Outcome.SUCCEEDED


def test_without_survivors_all_begin_again() -> None:
    job = two_nodes(max_restarts=1)
    job.reported("a", running(0, broken="rank 1 failed"), 1.0)
    job.reported("a", end(0, causes=(FAILED,)), 1.0)
    action = opened(job.reported("b", end(0), 1.0))
    assert [member.size for member in action.members] == [2, 2]


def test_a_node_is_lost_and_the_other_goes_on() -> None:
    job = two_nodes()
    job.node_lost("a", "its connection closed", 1.0)
    action = opened(job.reported("b", end(0, survivors=2), 1.0))
    assert [(member.key, member.size) for member in action.members] == [("b", 2)]


def test_a_survivor_that_dies_while_it_waits_is_replaced() -> None:
    job = Coordinator(Limits(min_nodes=2, max_nodes=2), max_restarts=1)
    job.opened(0.0)
    for key in "ab":
        job.joined(Member(key=key, host=f"h{key}", local_world_size=2), 0.0)
    job.node_lost("b", "its connection closed", 1.0)
    job.reported("a", end(0, survivors=2), 1.0)
    assert job.stage is JobStage.GATHERING
    job.reported("a", end(0, survivors=1, causes=(FAILED,)), 2.0)
    action = opened(job.joined(Member(key="c", host="hc", local_world_size=2), 3.0))
    assert [(member.key, member.size) for member in action.members] == [("a", 1), ("c", 0)]
    assert action.may_replace


OLD = Member(key="a", host="ha", local_world_size=2, taking_part=2)
# Each node's report to a new coordinator, of round 4 or older ones, and who goes on there.
RESUMED = {
    "it ended the round": (OLD, end(4, survivors=2), 2),
    "one of them died": (OLD, end(4, survivors=1), 1),
    "it never began": (OLD, end(3, survivors=2), 2),
    "it never began, nor where others were": (
        OLD.__replace__(taking_part=1),
        end(3, survivors=2),
        2,
    ),
    "it had missed a round before": (
        OLD.__replace__(taking_part=0),
        end(1, survivors=2, ready=1),
        0,
    ),
    "all were to begin anew": (OLD.__replace__(taking_part=-1), end(3, survivors=2), 0),
}


@pytest.mark.parametrize(("member", "report", "size"), RESUMED.values(), ids=RESUMED.keys())
def test_a_new_coordinator_is_told_who_goes_on(
    member: Member, report: NodeReport, size: int
) -> None:
    other = OLD.__replace__(key="b", node_rank=1)
    job = Coordinator.resumed(
        Limits(min_nodes=3, max_nodes=3),
        0,
        members=(member.__replace__(node_rank=0), other),
        round_number=4,
        runs=False,
        restarts=0,
        now=0.0,
    )
    new = Member(key="c", host="hc", local_world_size=2)
    job.joined(new, 0.0)
    job.joined(new.__replace__(key="d"), 0.0)
    assert job.joined(other, 0.0, end(4, survivors=2)).actions == (), "one has not been heard"
    action = opened(job.joined(member, 1.0, report))
    assert (action.number, action.because) == (5, "the coordinator changed")
    assert {each.key: each.size for each in action.members} == {"a": size, "b": 2, "c": 0}
