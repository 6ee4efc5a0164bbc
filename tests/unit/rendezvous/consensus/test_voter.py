"""One voter, told one thing after another: tables of what it then answers, and why."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.consensus.messages import (
    Accepted,
    Agreement,
    Ballot,
    Prepare,
    Promise,
    Propose,
    Refused,
    Setup,
)
from rallypoint.rendezvous.consensus.register import Voter, before_all, slot_key
from rallypoint.rendezvous.consensus.rules import Rules
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.timeouts import Timeouts

A, B, C = (Member(key=key, host=key, local_world_size=1) for key in "abc")
ENDPOINTS = tuple(Endpoint(host=host, port=1) for host in "ab")
FENCE_S = 10.0
ONE = Agreement(number=1, members=(A, B, C), host="a")
TWO = ONE.__replace__(number=2, members=(A, B))
OTHER_TWO = ONE.__replace__(number=2, members=(B, C))
THREE = ONE.__replace__(number=3, members=(B,))
LOW, MIDDLE, HIGH = Ballot(1, "a"), Ballot(2, "c"), Ballot(3, "a")


def setup_of(me: Member, slot: int | None = None) -> Setup:
    return Setup(
        me=me,
        run_id="job",
        limits=Limits(),
        endpoints=ENDPOINTS,
        slot=slot,
        timeouts=Timeouts(heartbeat_s=FENCE_S / 4, missed_heartbeats=4),
    )


def voter_of(knows: Agreement | None, me: Member = B, slot: int | None = None) -> Voter:
    setup = setup_of(me, slot)
    voter = Voter(setup, Rules(setup))
    if knows is not None:
        voter.learn(knows)
    return voter


def prepare(ballot: Ballot, decided: Agreement, *, is_trial: bool = False) -> Prepare:
    return Prepare(ballot=ballot, stamp=0.0, decided=decided, is_trial=is_trial)


def propose(ballot: Ballot, agreement: Agreement, decided: Agreement) -> Propose:
    return Propose(ballot=ballot, stamp=0.0, agreement=agreement, decided=decided)


ALIVE, SILENT = 1.0, FENCE_S * 1.02  # how long the last word is ago when the next one comes

STORIES = {
    "the first ballot is promised": [(prepare(LOW, ONE), SILENT, Promise)],
    "a lower one is not, then": [
        (prepare(MIDDLE, ONE), SILENT, Promise),
        (prepare(LOW, ONE), SILENT, Refused),
    ],
    "nor is its proposal accepted": [
        (prepare(MIDDLE, ONE), SILENT, Promise),
        (propose(LOW, TWO, ONE), SILENT, Refused),
    ],
    "a higher one is": [
        (prepare(LOW, ONE), SILENT, Promise),
        (prepare(HIGH, ONE), SILENT, Promise),
    ],
    "a trial promises nothing": [
        (prepare(MIDDLE, ONE, is_trial=True), SILENT, Promise),
        (prepare(LOW, ONE), SILENT, Promise),
    ],
    "a coordinator that lives is not left": [
        (propose(LOW, TWO, ONE), SILENT, Accepted),
        (prepare(MIDDLE, ONE), ALIVE, Refused),
    ],
    "one that is silent is": [
        (propose(LOW, TWO, ONE), SILENT, Accepted),
        (prepare(MIDDLE, ONE), SILENT, Promise),
    ],
    "one may be elected again": [
        (propose(LOW, TWO, ONE), SILENT, Accepted),
        (prepare(HIGH, ONE), ALIVE, Promise),
    ],
    "what is decided is not decided again by another one": [
        (propose(LOW, TWO, ONE), SILENT, Accepted),
        (propose(LOW, THREE, TWO), ALIVE, Accepted),  # so two is decided
        (propose(MIDDLE, TWO, ONE), SILENT, Refused),
        (propose(MIDDLE, OTHER_TWO, ONE), SILENT, Refused),
    ],
    "but may be told again": [
        (propose(LOW, THREE, TWO), SILENT, Accepted),
        (propose(LOW, TWO, TWO), ALIVE, Accepted),
    ],
    "who knows less is refused": [
        (propose(LOW, THREE, TWO), SILENT, Accepted),
        (prepare(MIDDLE, ONE), SILENT, Refused),
    ],
    "another job is refused": [(prepare(LOW, ONE.__replace__(host="z")), SILENT, Refused)],
    "who is not of the list has no vote": [
        (prepare(LOW, ONE.__replace__(members=(A, C))), SILENT, Refused)
    ],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_answers(story: list[tuple[Prepare | Propose, float, type]]) -> None:
    voter, now = voter_of(ONE), 0.0
    for message, later_s, expected in story:
        now += later_s
        answer = (
            voter.prepare(message, now)
            if isinstance(message, Prepare)
            else voter.propose(message, now)
        )
        assert type(answer) is expected, message


def test_a_promise_tells_what_was_accepted_and_in_which_ballot() -> None:
    voter = voter_of(ONE)
    voter.propose(propose(LOW, TWO, ONE), 0.0)
    promise = voter.prepare(prepare(MIDDLE, ONE), SILENT)
    assert isinstance(promise, Promise)
    assert (promise.accepted, promise.accepted_in, promise.voter) == (TWO, LOW, "b")


def test_what_is_decided_is_accepted_no_more() -> None:
    voter = voter_of(ONE)
    voter.propose(propose(LOW, TWO, ONE), 0.0)
    voter.decided_in(MIDDLE, 2)  # another ballot may have decided another one
    assert (voter.number, voter.accepted) == (1, TWO)
    voter.decided_in(LOW, 2)
    assert (voter.number, voter.accepted) == (2, None)


@pytest.mark.parametrize(("later_s", "is_early"), [(ALIVE, True), (SILENT, False)])
def test_a_lost_coordinator_is_left_at_once_but_early(later_s: float, is_early: bool) -> None:
    voter = voter_of(ONE)
    voter.propose(propose(LOW, TWO, ONE), 0.0)
    voter.lost("a")
    promise = voter.prepare(prepare(MIDDLE, ONE), later_s)
    assert isinstance(promise, Promise) and promise.was_lost == is_early


def test_who_is_elected_again_may_have_let_others_run_before() -> None:
    voter = voter_of(ONE)
    voter.propose(propose(LOW, TWO, ONE), 0.0)
    promise = voter.prepare(prepare(HIGH, ONE), ALIVE)
    assert isinstance(promise, Promise) and promise.was_lost


def test_an_endpoint_votes_until_it_hears_of_a_job() -> None:
    voter = voter_of(None, slot=1)
    assert voter.has_vote()
    promise = voter.prepare(prepare(LOW, before_all(ENDPOINTS)), 0.0)
    assert isinstance(promise, Promise) and promise.voter == slot_key(1)
    voter.job_exists("a")
    assert not voter.has_vote()
    refused = voter.prepare(prepare(HIGH, before_all(ENDPOINTS)), SILENT)
    assert isinstance(refused, Refused) and refused.job == "a"


def test_an_endpoint_keeps_its_vote_on_the_job_that_it_helped_to_begin() -> None:
    voter, zero = voter_of(None, slot=1), ONE.__replace__(number=0)
    voter.propose(propose(LOW, zero, before_all(ENDPOINTS)), 0.0)
    voter.job_exists(zero.host)
    promise = voter.prepare(prepare(MIDDLE, before_all(ENDPOINTS)), SILENT)
    assert isinstance(promise, Promise) and promise.accepted == zero


def test_a_job_that_was_left_is_accepted_no_more() -> None:
    setup = setup_of(B)
    voter = Voter(setup, Rules(setup), frozenset({"a"}))
    assert isinstance(voter.propose(propose(LOW, TWO, ONE), 0.0), Refused)
    assert voter.decided is None
