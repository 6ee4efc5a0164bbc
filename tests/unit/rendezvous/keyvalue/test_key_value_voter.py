"""What an agent is answered in etcd's name, message by message, on a simulated etcd."""

from __future__ import annotations

from random import Random

import pytest
from tests.simulation.sim_clock import SimLoop
from tests.simulation.sim_keeper import SimEtcd

from rallypoint.base.errors import ControlMessageError
from rallypoint.rendezvous.consensus.messages import (
    Accepted,
    Agreement,
    Ballot,
    Led,
    Message,
    Over,
    Prepare,
    Promise,
    Propose,
    Refused,
    Setup,
)
from rallypoint.rendezvous.consensus.register import before_all
from rallypoint.rendezvous.consensus.rules import KEEPER
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.reports import Finish, Join, NodeReport, Outcome
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.keyvalue.keeper import (
    Claim,
    JobKeys,
    Read,
    Request,
    Transact,
    pack,
    unpack,
)
from rallypoint.rendezvous.keyvalue.key_value_register import KeyValueRules
from rallypoint.rendezvous.keyvalue.key_value_voter import Answer, KeyValueVoter
from rallypoint.rendezvous.timeouts import Timeouts

PLACE = Endpoint(host="etcd", port=2379)
TIMEOUTS = Timeouts(heartbeat_s=1.0, missed_heartbeats=5.0, outage_s=20.0)
FENCE_S = 5.0 * 1.01  # with what clocks may differ


def member(name: str) -> Member:
    return Member(key=name, host=name, local_world_size=1, address=name, port=1)


class Agent:
    """One agent's voter, on an etcd that answers at once."""

    def __init__(self, name: str, etcd: SimEtcd) -> None:
        self.setup = Setup(
            me=member(name), run_id="job", limits=Limits(), endpoints=(PLACE,), timeouts=TIMEOUTS
        )
        self.voter = KeyValueVoter(self.setup)
        self.etcd = etcd
        self.late: list[Request] = []  # given up, and carried out when a test says so
        self.gives_up = False

    def say(self, message: Message, now: float) -> list[Answer]:
        request = self.voter.ask(message, now)
        while request is not None:
            if self.gives_up and isinstance(request, Transact):
                self.late.append(request)
                self.voter.failed("no answer")
                break
            request = self.voter.go_on(self.etcd.apply(request), now)
        return self.voter.take()

    def stand(self, term: int, now: float, decided: Agreement | None = None) -> Answer:
        ballot = Ballot(term, self.setup.me.key)
        decided = before_all((PLACE,)) if decided is None else decided
        prepare = Prepare(ballot=ballot, stamp=now, decided=decided, is_trial=False)
        return self.say(prepare, now)[0]

    def propose(self, term: int, agreement: Agreement, now: float) -> Answer:
        ballot = Ballot(term, self.setup.me.key)
        propose = Propose(ballot=ballot, stamp=now, agreement=agreement, decided=agreement)
        answers = self.say(propose, now)
        return answers[0] if answers else ""


def agreement(number: int, *names: str, finish: Finish | None = None) -> Agreement:
    members = tuple(member(name) for name in names)
    return Agreement(number=number, members=members, host="A", finish=finish)


@pytest.fixture
def etcd() -> SimEtcd:
    return SimEtcd(SimLoop(), Random(0))


def begun(etcd: SimEtcd, *members: str) -> Agent:
    """A coordinates, at time 0."""
    first = Agent("A", etcd)
    assert isinstance(first.stand(1, 0.0), Promise)
    assert isinstance(first.propose(1, agreement(0, "A", *members), 0.0), Accepted)
    return first


def test_one_wins_and_the_others_learn_who(etcd: SimEtcd) -> None:
    first, second = Agent("A", etcd), Agent("B", etcd)
    promise = first.stand(1, 0.0)
    assert isinstance(promise, Promise)
    assert (promise.voter, promise.member.key, promise.was_lost) == (KEEPER, "A", False)
    refused = second.stand(2, 0.0)
    assert isinstance(refused, Refused)
    assert refused.leader == member("A")
    join = Join(run_id="job", report=NodeReport(), min_nodes=1, max_nodes=1, member=member("B"))
    (led,) = second.say(join, 0.0)
    assert isinstance(led, Led)
    assert led.leader == member("A")


def test_two_at_one_moment(etcd: SimEtcd) -> None:
    """Both have read that nobody coordinates; the second one's write finds the first's."""
    first, second = Agent("A", etcd), Agent("B", etcd)
    ballot = Ballot(1, "B")
    prepare = Prepare(ballot=ballot, stamp=0.0, decided=before_all((PLACE,)), is_trial=False)
    request = second.voter.ask(prepare, 0.0)
    while isinstance(request, Read):
        request = second.voter.go_on(etcd.apply(request), 0.0)
    first.stand(1, 0.0)
    while request is not None:
        request = second.voter.go_on(etcd.apply(request), 0.0)
    (refused, _) = second.voter.take()
    assert isinstance(refused, Refused)
    assert refused.leader == member("A")


@pytest.mark.parametrize("number", [0, 1])  # a heartbeat, or an agreement
def test_a_member_takes_over_after_silence_and_learns_first(etcd: SimEtcd, number: int) -> None:
    first, second = begun(etcd, "B"), Agent("B", etcd)
    held = agreement(0, "A", "B")
    second.stand(2, 100.0)  # it sees the newest heartbeat for the first time
    assert isinstance(second.stand(2, 100.0 + FENCE_S - 0.1, held), Refused)
    first.propose(1, held, 4.0)  # a heartbeat
    assert isinstance(second.stand(2, 100.0 + FENCE_S + 0.1, held), Refused)
    unlearned = second.stand(2, 100.2 + 2 * FENCE_S)
    assert isinstance(unlearned, Refused)
    assert unlearned.decided == held
    promise = second.stand(2, 100.2 + 2 * FENCE_S, held)
    assert isinstance(promise, Promise)
    assert not promise.was_lost
    # The one before cannot write any more, and is told.
    refused = first.propose(1, agreement(number, "A"), 5.0)
    assert isinstance(refused, Refused)
    assert refused.promised == Ballot(2, "B")
    key = JobKeys("job", 0).agreement
    assert unpack(Agreement, etcd.pairs[key][0]) == held


def test_a_closed_connection_ends_the_wait_of_members(etcd: SimEtcd) -> None:
    begun(etcd, "B")
    held = agreement(0, "A", "B")
    second, stranger = Agent("B", etcd), Agent("C", etcd)
    for agent in (second, stranger):
        agent.voter.lost("A")
    assert isinstance(stranger.stand(2, 0.0, held), Refused)
    promise = second.stand(2, 0.0, held)
    assert isinstance(promise, Promise)
    assert promise.was_lost


def test_any_number_of_agents_may_end(etcd: SimEtcd) -> None:
    """What is remembered of them is bounded, and the newest counts."""
    begun(etcd, "B")
    second, held = Agent("B", etcd), agreement(0, "A", "B")
    for number in range(70_000):
        second.voter.lost(f"agent {number}")
    assert isinstance(second.stand(2, 0.0, held), Refused)
    second.voter.lost("A")
    assert len(second.voter._lost) == 1 << 16
    assert isinstance(second.stand(2, 0.0, held), Promise)


def test_who_is_no_member_waits_until_no_member_can_run(etcd: SimEtcd) -> None:
    begun(etcd, "B")
    stranger, held = Agent("C", etcd), agreement(0, "A", "B")
    stranger.stand(2, 0.0, held)
    assert isinstance(stranger.stand(2, 20.1, held), Refused)
    assert isinstance(stranger.stand(2, 20.3, held), Promise)


def test_a_write_that_comes_too_late_changes_nothing(etcd: SimEtcd) -> None:
    first = begun(etcd)
    first.gives_up = True
    first.propose(1, agreement(1, "A"), 1.0)
    first.gives_up = False
    assert isinstance(first.propose(1, agreement(1, "A"), 2.0), Accepted)
    assert isinstance(first.propose(1, agreement(2, "A"), 3.0), Accepted)
    for request in first.late:
        assert etcd.apply(request) is None
    found = unpack(Agreement, etcd.pairs[JobKeys("job", 0).agreement][0])
    assert found.number == 2


def test_a_write_whose_answer_was_lost_counts(etcd: SimEtcd) -> None:
    first = begun(etcd)
    first.gives_up = True
    first.propose(1, agreement(1, "A"), 1.0)
    first.gives_up = False
    assert etcd.apply(first.late[0]) is not None
    assert isinstance(first.propose(1, agreement(1, "A"), 2.0), Accepted)
    assert isinstance(first.propose(1, agreement(2, "A"), 3.0), Accepted)


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.GIVEN_UP])
def test_who_comes_too_late_is_told_for_a_while(etcd: SimEtcd, outcome: Outcome) -> None:
    first, finish = begun(etcd, "B"), Finish(outcome=outcome, because="it ended")
    first.propose(1, agreement(1, "A", "B", finish=finish), 0.0)
    late, stays = Agent("C", etcd), Agent("B", etcd)
    over = late.stand(1, 1.0)
    assert isinstance(over, Over)
    assert over.finish.outcome is Outcome.GIVEN_UP  # nothing has run there
    assert "the job 'job' is over (it ended), and this node joined too late" in over.finish.because
    etcd._loop.run(31.0)  # close_timeout
    assert isinstance(late.stand(1, 31.0), Promise)
    # Who was a member of that job is told, even when another one has its name.
    for decided in (agreement(0, "A", "B"), before_all((PLACE,)).__replace__(host="A")):
        assert stays.stand(2, 31.0, decided) == Over(finish=finish)


def test_a_job_that_was_stopped_makes_way_at_once(etcd: SimEtcd) -> None:
    first, finish = begun(etcd, "B"), Finish(outcome=Outcome.STOPPED, because="SIGTERM")
    first.propose(1, agreement(1, "A", "B", finish=finish), 0.0)
    assert Agent("B", etcd).stand(2, 1.0, agreement(0, "A", "B")) == Over(finish=finish)
    anew = Agent("C", etcd)
    assert isinstance(anew.stand(1, 1.0), Promise)
    assert JobKeys("job", 0).agreement not in etcd.pairs
    assert Agent("B", etcd).stand(2, 1.0, agreement(0, "A", "B")) == Over(finish=finish)
    assert first.propose(1, agreement(1, "A", "B"), 2.0) == Over(finish=finish)


def test_a_name_that_was_closed_stays_closed(etcd: SimEtcd) -> None:
    first, held = begun(etcd, "B"), agreement(0, "A", "B")
    closed = JobKeys("job", 0).closed
    etcd.apply(Transact(revisions={closed: 0}, puts={closed: b"B closed it"}))
    over = Over(finish=Finish(outcome=Outcome.STOPPED, because="B closed it"))
    assert first.propose(1, held, 1.0) == over  # its next heartbeat
    assert Agent("B", etcd).stand(2, 1.0, held) == over
    assert Agent("C", etcd).stand(1, 100.0) == over


def test_who_closes_a_name_also_ends_its_own_job_by_its_own_word(etcd: SimEtcd) -> None:
    first, closed = begun(etcd, "B"), JobKeys("job", 0).closed
    etcd.apply(Transact(revisions={closed: 0}, puts={closed: b"A closed it"}))
    last = agreement(1, "A", "B", finish=Finish(outcome=Outcome.STOPPED, because="A closed it"))
    assert isinstance(first.propose(1, last, 1.0), Accepted)


def test_nobody_waits_for_who_has_resigned(etcd: SimEtcd) -> None:
    first, held = begun(etcd, "B"), agreement(0, "A", "B")
    request = first.voter.resign()
    assert request is not None
    assert etcd.apply(request) is not None
    assert first.voter.resign() is None
    assert first.propose(1, held, 1.0) == ""  # it has no claim any more
    newcomer = Agent("C", etcd)
    unlearned = newcomer.stand(2, 1.0)
    assert isinstance(unlearned, Refused)
    assert unlearned.decided == held
    promise = newcomer.stand(3, 1.0, held)
    assert isinstance(promise, Promise)
    assert promise.was_lost  # its members' leases are to be waited for


def test_who_was_replaced_resigns_nothing(etcd: SimEtcd) -> None:
    first, second, held = begun(etcd, "B"), Agent("B", etcd), agreement(0, "A", "B")
    second.voter.lost("A")
    assert isinstance(second.stand(2, 0.0, held), Promise)
    request = first.voter.resign()
    assert request is not None
    assert etcd.apply(request) is None
    assert isinstance(second.propose(2, agreement(1, "B"), 1.0), Accepted)


def test_an_etcd_that_forgot_is_told_again(etcd: SimEtcd) -> None:
    first, held = begun(etcd, "B"), agreement(0, "A", "B")
    etcd.forget()
    refused = first.propose(1, held, 1.0)
    assert isinstance(refused, Refused)
    assert Ballot(1, "A") < refused.promised
    promise = first.stand(3, 1.0, held)
    assert isinstance(promise, Promise)
    assert promise.was_lost  # nobody knows when a coordinator wrote last
    # Who only knows that there was a job must not begin another one.
    etcd.forget()
    answer = Agent("C", etcd).stand(1, 1.0, before_all((PLACE,)).__replace__(host="A"))
    assert isinstance(answer, str)
    assert "has lost the job's record" in answer


def test_while_etcd_is_away_all_members_must_be_heard() -> None:
    rules = KeyValueRules(Agent("A", SimEtcd(SimLoop(), Random(0))).setup)
    two, three = agreement(0, "A", "B"), agreement(1, "A", "B", "C")
    heard = {"A": 50.0, "B": 49.0, KEEPER: 48.0}
    assert rules.newest_word(two, None, {KEEPER: 48.0}) == 48.0
    assert rules.newest_word(two, None, heard) == 49.0
    # What is proposed may have been written already, and C may act on it.
    assert rules.newest_word(two, three, heard) == 48.0
    assert rules.newest_word(two, three, {**heard, "C": 48.5}) == 48.5
    # For outage_s in all, of which the last fence_s are what members are given.
    assert rules.newest_word(two, None, {**heard, KEEPER: 30.0}) == 45.0


def test_keys_of_one_job_begin_no_other() -> None:
    names = ["a", "a/0", "a/", "a%2f;", "", "é", "a b", "a%2f;0"]
    roots = {JobKeys(name, attempt).root for name in names for attempt in (0, 1, 10)}
    assert len(roots) == 3 * len(names)
    assert not any(a != b and b.startswith(a) for a in roots for b in roots)


def test_ten_thousand_members_fit_into_etcd() -> None:
    names = [f"node{i}.cluster.example.org" for i in range(10_000)]
    random = Random(0)
    members = tuple(
        member(name).__replace__(key=random.randbytes(8).hex(), node_rank=rank)
        for rank, name in enumerate(names)
    )
    large = Agreement(number=7, members=members, runs=True, round=3, host=members[0].key)
    assert len(pack(large)) < 1_000_000
    assert unpack(Agreement, pack(large)) == large
    claim = Claim(ballot=Ballot(3, "A"), leader=member("A"), host="B", lease="7")
    assert unpack(Claim, pack(claim)) == claim
    for data in (pack(claim), b"", b"x" * 9, b"[3]"):
        with pytest.raises(ControlMessageError):
            unpack(Agreement, data)
