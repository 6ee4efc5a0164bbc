"""Messages survive the wire, and whatever else comes is refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.record import Record
from rallypoint.rendezvous.consensus.messages import (
    NO_BALLOT,
    Accepted,
    Ack,
    Agreement,
    Ballot,
    Go,
    Halt,
    Heartbeat,
    Led,
    Message,
    Over,
    Prepare,
    Promise,
    Propose,
    Refused,
    Unknown,
)
from rallypoint.rendezvous.job.reports import (
    Finish,
    NodeReport,
    Notice,
    Outcome,
    RankFailure,
    Refuse,
    Start,
    Stop,
)
from rallypoint.rendezvous.job.round import Endpoint, Member, seats_of
from rallypoint.rendezvous.transport.codec import (
    VERSION,
    OtherVersionError,
    decode,
    decode_record,
    encode,
)

MEMBER = Member(node_rank=0, host="h", local_world_size=2, role="r")
SEATS = seats_of((MEMBER,), number=1, store=Endpoint(host="a", port=1))
CAUSE = RankFailure(rank=1, node_rank=0, text="t", is_secondary=True)
ENDED = NodeReport(
    round=2, has_begun=True, causes=(CAUSE, CAUSE), unkillable=1, leaves="SIGTERM", ready=3
)
FINISH = Finish(outcome=Outcome.GIVEN_UP, because="b", culprit=3, what="w")
BALLOT = Ballot(3, "key")
SECOND = MEMBER.__replace__(key="k", node_rank=1)
AGREEMENT = Agreement(number=2, members=(MEMBER, SECOND), round=1, runs=True, host="key")
GO = Go(
    ballot=BALLOT,
    sent_at=1.0,
    lease_s=5.0,
    number=1,
    start=Start(seat=SEATS[MEMBER.key]),
    voters=(MEMBER,),
)
ACK = Ack(ballot=BALLOT, sent_at=1.0, stamp=2.5, lease_s=5.0, number=-1, waiting=0)
MESSAGES: list[Message] = [
    Over(finish=FINISH),
    Over(finish=Finish(outcome=Outcome.SUCCEEDED, because="b")),
    Halt(ballot=BALLOT, stop=Stop(round=1, because="b")),
    Unknown(ballot=BALLOT),
    Notice("\u00e9\n"),
    Refuse("k", "w"),
    *[
        Heartbeat(key="k", ballot=BALLOT, sent_at=1.0, stamp=stamp, number=number, report=report)
        for stamp, number, report in [
            (None, 1, NodeReport(round=2, broken="x", is_over=False, stop_asked="\u00e9\n")),
            (None, 1, ENDED),
            (2.0, 1, NodeReport(round=7, has_begun=True, is_over=False, ready=2)),
            (None, -2, NodeReport()),
        ]
    ],
    ACK,
    ACK.__replace__(done=("a", "b")),
    ACK.__replace__(is_stopping=True),
    GO,
    Prepare(ballot=BALLOT, stamp=1.0, decided=AGREEMENT, is_trial=True),
    Promise(
        ballot=BALLOT,
        voter="k",
        member=MEMBER,
        stamp=1.0,
        accepted=AGREEMENT.__replace__(finish=FINISH),
        accepted_in=NO_BALLOT,
        was_lost=False,
        is_trial=False,
    ),
    Propose(ballot=BALLOT, stamp=1.0, agreement=AGREEMENT, decided=AGREEMENT),
    Accepted(ballot=BALLOT, voter="k", stamp=1.0, number=2, store=Endpoint(host="::1", port=1)),
    Refused(ballot=BALLOT, promised=BALLOT, leader=MEMBER),
    Led(ballot=BALLOT, leader=MEMBER, host="k", number=1, round=-1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_there_and_back(message: Message) -> None:
    assert decode(encode(message)) == message


def test_what_is_kept_elsewhere() -> None:
    """Any record, by whoever knows what it must be; to an agent it is no message."""
    assert decode_record(Member, encode(MEMBER)) == MEMBER
    for data in (encode(MEMBER), encode(ENDED)):
        with pytest.raises(ControlMessageError):
            decode(data)
    for data in (encode(ACK), encode(ENDED), b"", b"[]"):
        with pytest.raises(ControlMessageError):
            decode_record(Member, data)


@pytest.mark.parametrize(
    "body",
    [
        [VERSION - 1, "Refuse", "k", "w"],
        [VERSION, "Rebuff", "k", "w"],
        [VERSION, "Refuse", "k"],
        [VERSION, "Refuse", "k", "w", 3],
        [VERSION, "Unknown", ["1", "k"]],
        [VERSION, "Unknown", [True, "k"]],
        [VERSION, "Unknown", [None, "k"]],
        [VERSION, "Over", ["other", "b", None, "", False]],
        [VERSION, "Accepted", [1, "k"], "v", math.inf, 1, None],
        [VERSION, "Accepted", [1, "k"], "v", 1, 1, None],
        [VERSION, "Propose", [1, "k"], 1.0, [2, [], 1, True, 0, "", "", None], [0, []]],
        {"v": VERSION},
        [],
        None,
    ],
    ids=str,
)
def test_only_exactly_a_message_is_one(body: object) -> None:
    with pytest.raises(ControlMessageError):
        decode(json.dumps(body).encode())


@pytest.mark.parametrize("kind", ["Refuse", "Join"])
def test_another_version_is_told_from_an_invalid_message(kind: str) -> None:
    """And so is its refusal, whatever its fields are there."""
    with pytest.raises(OtherVersionError, match="another version of rallypoint") as caught:
        decode(json.dumps([VERSION + 1, kind, {"unknown": 1}]).encode())
    assert caught.value.is_refusal == (kind == "Refuse")


def test_a_message_by_hand() -> None:
    data = json.dumps([VERSION, "Refuse", "k", "w"]).encode()
    assert decode(data) == Refuse("k", "w")


def test_a_round_of_nobody_is_no_agreement() -> None:
    nobody = [2, [], 1, True, 0, "", "", None, True, False]
    body = [VERSION, "Propose", [1, "k"], 1.0, nobody, nobody]
    with pytest.raises(ControlMessageError):
        decode(json.dumps(body).encode())
    idle = [2, [], 1, False, 0, "", "", None, True, False]
    body = [VERSION, "Propose", [1, "k"], 1.0, idle, idle]
    assert isinstance(decode(json.dumps(body).encode()), Propose)


def row_of(record: Record) -> list[object]:
    """As in a message."""
    return json.loads(encode(record))[2:]  # type: ignore[no-any-return]


HARMFUL: list[tuple[Record, str, object]] = [
    (SEATS[MEMBER.key], "number", -1),
    (SEATS[MEMBER.key], "node_rank", 1),
    (SEATS[MEMBER.key], "node_rank", -1),
    (SEATS[MEMBER.key], "local_world_size", 3),
    (SEATS[MEMBER.key], "local_world_size", -1),
    (SEATS[MEMBER.key], "first_rank", 1),
    (SEATS[MEMBER.key], "first_rank", -1),
    (SEATS[MEMBER.key], "world_size", 1),
    (SEATS[MEMBER.key], "world_size", 1 << 60),
    (SEATS[MEMBER.key], "first_role_rank", 1),
    (SEATS[MEMBER.key], "role_world_size", 3),
    (MEMBER, "node_rank", -2),
    (MEMBER, "taking_part", 3),
    (MEMBER, "local_world_size", -1),
    (MEMBER, "host", "h" * (1 << 14)),
    (MEMBER, "addresses", ["10.0.0.1"] * (1 << 12)),
    (Endpoint(host="a", port=1), "host", "a\0LD_PRELOAD=b"),
    (Endpoint(host="a", port=1), "port", 1 << 16),
    (Endpoint(host="a", port=1), "port", -1),
    (AGREEMENT, "members", [row_of(MEMBER), row_of(MEMBER)]),
    (AGREEMENT, "round", -1),
    (AGREEMENT, "number", 1 << 53),
    (ENDED, "ready", -1),
    (ENDED, "survivors", -1),
    (ENDED, "round", -2),
    (BALLOT, "term", -1),
    (BALLOT, "term", 1 << 64),
]


@pytest.mark.parametrize(("record", "name", "value"), HARMFUL, ids=lambda value: f"{value!r:.12}")
def test_what_would_harm_an_agent_is_refused(record: Record, name: str, value: object) -> None:
    """It would start ranks without limit, or stop at its own next message."""
    row = row_of(record)
    assert decode_record(type(record), encode(record)) == record
    row[type(record)._fields.index(name)] = value
    with pytest.raises(ControlMessageError):
        decode_record(type(record), json.dumps([VERSION, type(record).__name__, *row]).encode())


def test_a_harmful_order_is_refused_as_a_whole() -> None:
    assert decode(encode(GO)) == GO
    text = encode(GO).decode()
    seat = json.dumps(row_of(SEATS[MEMBER.key]), separators=(",", ":"))
    assert seat in text
    with pytest.raises(ControlMessageError):
        decode(text.replace(seat, seat.replace(",1,2,0,2,0,2]", ",1,9,0,2,0,2]")).encode())


@pytest.mark.parametrize("at", [1, 25, 33], ids=["term", "number", "round"])
def test_numbers_of_a_pulse_leave_room_for_the_next(at: int) -> None:
    data = bytearray(encode(MESSAGES[8]))
    assert data[:1] == b"B"
    data[at : at + 8] = ((1 << 63) - 1).to_bytes(8, "big")
    with pytest.raises(ControlMessageError):
        decode(bytes(data))


@pytest.mark.parametrize("message", [each for each in MESSAGES if encode(each)[:1] in (b"A", b"B")])
def test_any_cut_pulse_is_refused(message: Message) -> None:
    data = encode(message)
    for length in range(1, len(data) - len(BALLOT.candidate)):
        with pytest.raises(ControlMessageError):
            decode(data[:length])
    not_a_number = bytes([0x7F, 0xF0]) + bytes(6)
    with pytest.raises(ControlMessageError):
        decode(data[:9] + not_a_number + data[17:])


@given(st.binary() | st.recursive(st.none() | st.text(), st.lists).map(lambda x: str(x).encode()))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ControlMessageError):
        decode(data)
