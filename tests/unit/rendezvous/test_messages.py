"""Reports and orders survive the wire, and whatever else comes is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import ControlMessageError
from rallypoint.rendezvous.messages import Message, Opened, decode, encode
from rallypoint.rendezvous.reports import Broken, Ended, Finish, Outcome, Start, Stop, StopAsked
from rallypoint.rendezvous.round import Endpoint, Member, Round
from rallypoint.rendezvous.verdict import Cause

MEMBER = Member(node_rank=0, host="h", local_world_size=2, role="r")
ROUND = Round(number=1, members=(MEMBER,), store=Endpoint(host="a", port=1))
CAUSE = Cause(rank=1, node_rank=0, text="t", time_s=0.5, is_echo=True)
MESSAGES: list[Message] = [
    Broken(node_rank=1, round=2, text="x"),
    Ended(node_rank=1, round=2, succeeded=False, causes=(CAUSE, CAUSE), unkillable=1),
    Ended(node_rank=1, round=2, succeeded=True),
    StopAsked(node_rank=1, text="\u00e9\n"),
    MEMBER,
    Opened(round=ROUND, because=""),
    Start(seat=ROUND.seats()[MEMBER.key], because=""),
    Stop(round=1, because="b"),
    Finish(outcome=Outcome.GIVEN_UP, because="b", culprit=3, what="w"),
    Finish(outcome=Outcome.SUCCEEDED, because="b"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_there_and_back(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "change",
    [{"kind": "Cause"}, {"v": 1}, {"round": "1"}, {"round": True}, {"more": 1}, {"round": None}],
)
def test_what_is_not_exactly_a_message_is_refused(change: dict[str, object]) -> None:
    fields = json.loads(encode(MESSAGES[0])) | change
    with pytest.raises(ControlMessageError):
        decode(json.dumps(fields).encode())


@given(st.binary() | st.recursive(st.none() | st.text(), st.lists).map(lambda x: str(x).encode()))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ControlMessageError):
        decode(data)
