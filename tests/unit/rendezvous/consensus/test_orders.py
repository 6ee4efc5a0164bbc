"""Which orders are said again, and when; and which of them an agent does not obey."""

from __future__ import annotations

from random import Random

import pytest

from rallypoint.rendezvous.consensus.ballot import Agreements
from rallypoint.rendezvous.consensus.messages import (
    Ack,
    Agreement,
    Ballot,
    Go,
    Led,
    Outbox,
    SendMessage,
    Setup,
    Unknown,
)
from rallypoint.rendezvous.consensus.participant import Part, Participant
from rallypoint.rendezvous.consensus.peers import Peers
from rallypoint.rendezvous.consensus.register import PeerRegister
from rallypoint.rendezvous.consensus.rounds import Orders
from rallypoint.rendezvous.consensus.rules import Rules
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.reports import (
    Ending,
    Finish,
    Join,
    NodeReport,
    Outcome,
    Start,
    Stop,
)
from rallypoint.rendezvous.job.round import Endpoint, Member, Seat, seats_of

BEAT_S = 1.0
STORE = Endpoint(host="a", port=2)
LEADER = Member(key="a", host="hosta", local_world_size=2, node_rank=0)
ME = Member(key="b", host="hostb", local_world_size=2, node_rank=1)
BALLOT = Ballot(1, "a")


def test_a_beat_that_was_under_way_is_not_answered_with_the_same_order() -> None:
    orders = Orders(Ballot(1, "a"))
    halt = orders.halt_all(Stop(round=3, because="b was lost"), now=10.0)
    assert not orders.must_repeat("c", 10.9, BEAT_S)
    assert orders.must_repeat("c", 11.1, BEAT_S)
    assert orders.halt(Stop(round=3, because="b was lost")) is halt
    assert orders.halt(Stop(round=2, because="that round has ended")).stop.round == 2


def follower() -> Participant:
    """An agent that follows another's ballot, at 10 s."""
    setup = Setup(
        me=ME,
        run_id="job",
        limits=Limits(min_nodes=2, max_nodes=2),
        endpoints=(Endpoint(host="a", port=1),),
    )
    agent = Participant(PeerRegister(setup), Random(0))
    agent.started(9.0)
    led = Led(ballot=BALLOT, leader=LEADER, host="a", number=0, round=-1, stamp=1.0)
    agent.received("a", led, 10.0)
    assert agent.part is Part.FOLLOWING
    return agent


def order(seat: Seat, *, sent_at: float = 10.0, lease_s: float = 5.0) -> Go:
    return Go(
        ballot=BALLOT,
        sent_at=sent_at,
        lease_s=lease_s,
        number=0,
        start=Start(seat=seat),
        voters=(LEADER,),
    )


SEAT = seats_of((LEADER, ME), number=0, store=STORE)["b"]


@pytest.mark.parametrize(
    ("seat", "wrong"),
    [
        (
            SEAT.__replace__(local_world_size=500, world_size=502, role_world_size=502),
            "500 ranks on this node, which has 2",
        ),
        (SEAT.__replace__(nodes=9), "a round of 9 nodes in a job of at most 2"),
    ],
)
def test_a_seat_that_does_not_fit_this_node_is_refused(seat: Seat, wrong: str) -> None:
    """It would start as many ranks as a broken coordinator says."""
    decided = follower().received("a", order(seat), 10.1)
    (finish,) = [each for each in decided.actions if isinstance(each, Finish)]
    assert finish.outcome is Outcome.GIVEN_UP
    assert finish.because == (
        f"the coordinator on hosta (a) ordered {wrong}; install the same version of rallypoint on "
        "all nodes"
    )
    assert not any(isinstance(each, Start) for each in decided.actions)


def test_a_seat_that_fits_is_taken() -> None:
    decided = follower().received("a", order(SEAT), 10.1)
    assert [each for each in decided.actions if isinstance(each, Start)] == [Start(seat=SEAT)]


def test_a_node_that_was_counted_as_lost_joins_with_the_workers_that_it_has_paused() -> None:
    """If the others have continued, the next order ends them; if not, they have lost nothing."""
    agent = follower()
    agent.received("a", order(SEAT), 10.1)
    unknown = Unknown(ballot=BALLOT)
    pause = Stop(round=0, because="the coordinator does not know this node", ending=Ending.PAUSE)
    assert agent.received("a", unknown, 10.2).actions == (pause,)
    kept = NodeReport(round=0, has_begun=True, survivors=2, waits=True)
    agent.reported(kept, 10.3)
    (joins,) = agent.received("a", unknown, 10.4).actions
    assert isinstance(joins, SendMessage)
    assert isinstance(joins.message, Join)
    assert joins.message.report == kept.__replace__(was_cut_off=True)
    with_them = SEAT.__replace__(number=1)
    start = Start(seat=with_them, keeps=True)
    decided = agent.received("a", order(with_them).__replace__(start=start), 10.5)
    assert start in decided.actions


@pytest.mark.parametrize(("sent_at", "lease_s"), [(10.0, 1e9), (1e9, 5.0), (1e9, 1e9)])
def test_no_coordinator_lets_workers_run_for_longer_than_the_fence(
    sent_at: float, lease_s: float
) -> None:
    agent = follower()
    agent.received("a", order(SEAT, sent_at=sent_at, lease_s=lease_s), 10.1)
    ack = Ack(ballot=BALLOT, sent_at=sent_at, stamp=2.0, lease_s=lease_s, number=0, waiting=0)
    agent.received("a", ack, 10.2)
    assert agent.fence_at is not None
    assert agent.fence_at <= 10.2 + agent.setup.fence_s


def test_no_voter_has_heard_what_is_yet_to_be_sent() -> None:
    """A stamp from the future would let a coordinator continue for ever without a quorum."""
    third = Member(key="c", host="hostc", local_world_size=2, node_rank=2)
    setup, out = follower().setup, Outbox("b")
    rules, held = Rules(setup), Agreement(number=1, members=(LEADER, ME, third), host="a")
    agreements = Agreements(setup, rules, BALLOT, held, {})
    peers = Peers(setup, rules, agreements, out, was_lost=False, now=10.0)
    peers.confirms("c", 11.0, 11.0)
    assert peers.has_quorum(11.0 + 0.9 * setup.fence_s)
    peers.confirms("c", 1e9, 12.0)
    assert not peers.has_quorum(12.0 + setup.fence_s)
