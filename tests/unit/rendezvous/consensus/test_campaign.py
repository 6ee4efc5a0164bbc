"""A candidate's tally: which promises win, and what the winner must propose."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.consensus.ballot import Campaign
from rallypoint.rendezvous.consensus.messages import (
    NO_BALLOT,
    Agreement,
    Ballot,
    Call,
    Prepare,
    Promise,
    SendMessage,
    Setup,
)
from rallypoint.rendezvous.consensus.register import before_all, slot_key
from rallypoint.rendezvous.consensus.rules import Rules
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.round import Endpoint, Member

MEMBERS = {
    key: Member(key=key, host=key.upper(), local_world_size=1, address=key, port=1)
    for key in "abcde"
}
ENDPOINTS = tuple(Endpoint(host=host, port=1) for host in "abc")
BALLOT = Ballot(7, "a")


def listed(keys: str, number: int = 3) -> Agreement:
    return Agreement(number=number, members=tuple(MEMBERS[key] for key in keys), host="a")


def campaign_of(decided: Agreement, slot: int | None = None) -> Campaign:
    setup = Setup(me=MEMBERS["a"], run_id="job", limits=Limits(), endpoints=ENDPOINTS, slot=slot)
    return Campaign(setup, Rules(setup), BALLOT, decided, 5.0)


def promise(
    voter: str,
    *,
    accepted: Agreement | None = None,
    accepted_in: Ballot = NO_BALLOT,
    ballot: Ballot = BALLOT,
    is_trial: bool = False,
    was_lost: bool = False,
) -> Promise:
    return Promise(
        ballot=ballot,
        voter=voter,
        member=MEMBERS.get(voter, MEMBERS["a"]),
        stamp=5.0,
        accepted=accepted,
        accepted_in=accepted_in,
        was_lost=was_lost,
        is_trial=is_trial,
    )


@pytest.mark.parametrize(
    ("voters", "promised", "wins"),
    [
        ("a", "a", True),
        ("ab", "a", True),  # half, with the first
        ("ab", "b", False),
        ("abc", "a", False),
        ("abc", "bc", True),
        ("abcd", "ab", True),
        ("abcd", "cd", False),
        ("abcd", "bcd", True),
        ("abc", "bde", False),  # who is no voter does not count
    ],
)
def test_a_quorum_wins(voters: str, promised: str, wins: bool) -> None:
    campaign = campaign_of(listed(voters))
    campaign.in_earnest()
    for voter in promised:
        campaign.promised(promise(voter), 6.0)
    assert (campaign.won_at == 6.0) == wins
    assert {each.key for each in campaign.missing()} == set(voters) - set(promised)


def test_a_promise_counts_once_and_in_its_own_ballot_only() -> None:
    campaign = campaign_of(listed("abc"))
    campaign.in_earnest()
    for each in (
        promise("a"),
        promise("a"),
        promise("b", ballot=Ballot(6, "a")),
        promise("b", ballot=Ballot(7, "b")),
        promise("c", is_trial=True),
    ):
        campaign.promised(each, 6.0)
    assert campaign.won_at is None


def test_a_trial_is_asked_again_in_earnest() -> None:
    campaign = campaign_of(listed("abc"))
    asked = campaign.ask()
    assert all(isinstance(each.message, Prepare) for each in asked if isinstance(each, SendMessage))
    assert [each.to for each in asked if isinstance(each, SendMessage)] == ["a", "b", "c"]
    for voter in "ab":
        campaign.promised(promise(voter, is_trial=True), 6.0)
    assert campaign.won_at == 6.0
    campaign.in_earnest()
    assert campaign.won_at is None and not campaign.is_trial


@pytest.mark.parametrize(
    ("accepted", "bound"),
    [
        ({}, None),
        ({"b": (listed("ab", 4), Ballot(2, "b"))}, listed("ab", 4)),
        (
            {
                "b": (listed("ab", 4), Ballot(2, "b")),
                "c": (listed("bc", 4), Ballot(2, "c")),  # of one term, the later key
            },
            listed("bc", 4),
        ),
        (
            {"b": (listed("ab", 4), Ballot(5, "b")), "c": (listed("bc", 4), Ballot(2, "c"))},
            listed("ab", 4),
        ),
        ({"b": (listed("ab", 3), Ballot(5, "b"))}, None),  # that is decided
    ],
)
def test_the_newest_acceptance_binds(
    accepted: dict[str, tuple[Agreement, Ballot]], bound: Agreement | None
) -> None:
    campaign = campaign_of(listed("abc", 3))
    campaign.in_earnest()
    for voter in "abc":
        held, ballot = accepted.get(voter, (None, NO_BALLOT))
        campaign.promised(promise(voter, accepted=held, accepted_in=ballot), 6.0)
    assert campaign.bound() == bound


def test_a_job_begins_with_those_who_agree_to_it() -> None:
    campaign = campaign_of(before_all(ENDPOINTS), slot=0)
    asked = campaign.in_earnest()
    assert [type(each) for each in asked] == [SendMessage, Call, Call]
    for slot, key in ((2, "c"), (0, "a")):
        came = promise(slot_key(slot)).__replace__(member=MEMBERS[key])
        campaign.promised(came, 6.0)
    assert campaign.won_at == 6.0 and not campaign.is_unanimous
    first = campaign.bound()
    assert first is not None and (first.number, first.host) == (0, "a")
    assert [member.key for member in first.members] == ["a", "c"]
    assert campaign.slots() == {"a": slot_key(0), "c": slot_key(2)}


def test_one_early_promise_makes_the_winner_wait() -> None:
    campaign = campaign_of(listed("abc"))
    campaign.in_earnest()
    campaign.promised(promise("a"), 6.0)
    assert not campaign.was_lost
    campaign.promised(promise("b", was_lost=True), 6.0)
    assert campaign.was_lost


def test_it_says_who_is_missing_and_why_half_is_too_few() -> None:
    campaign = campaign_of(listed("bade"))
    campaign.in_earnest()
    for voter in "ad":
        campaign.promised(promise(voter), 6.0)
    text = campaign.text()
    assert text.startswith("2 of 4 last agreed members here")
    assert "the one with B continues" in text and text.endswith("missing B, E")
