"""The mailbox (mailbox*.cc, outboxes.cc, stash.cc): envelopes that are used again and again, taken
in turn or out of turn, taken in when there is no room, and messages that go in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from tests.model import waiting
from tests.model.code import Site
from tests.model.steps import (
    Fence,
    Load,
    Look,
    Looked,
    Program,
    Read,
    Scenario,
    Step,
    Store,
    Write,
    above,
    check,
    equals,
)
from tests.model.waiting import wait, wake

_PUT = ("mailbox_sending.cc", "Mailbox::put")
PUT_CLEAR = Site(*_PUT, "to.sequence.store(0")
PUT_FENCE = Site(*_PUT, "std::atomic_thread_fence(", "to.sequence.store(0")
PUT_TO = Site(*_PUT, "to.to.store(")
PUT_TAG = Site(*_PUT, "to.tag.store(")
PUT_ORDINAL = Site(*_PUT, "to.ordinal.store(")
PUT_REQUEST = Site(*_PUT, "to.request.store(")
PUT_SEQUENCE = Site(*_PUT, "to.sequence.store(sequence_")
PUT_PUBLISHED = Site(*_PUT, "published(self).store(")
PUT_WRITTEN = Site(*_PUT, "progress.written.load(")
PUT_TAKEN = Site(*_PUT, "progress.taken.load(")
PUT_RESET = Site(*_PUT, "progress.taken.store(")
SEND_FENCE = Site("mailbox_sending.cc", "Mailbox::send", "Region::fence()", "put(item, slot)")
LOOK_AT_TAKEN = Site("mailbox_sending.cc", "Mailbox::look_at", "region_.rank()).load(")
LOOK_AT_SEQUENCE = Site("mailbox_sending.cc", "Mailbox::look_at", "last.sequence.load(")
IS_RECEIVED = Site("mailbox_sending.cc", "Mailbox::go_on_sending", "to.sequence.load(")
GO_ON_FENCE = Site("mailbox_sending.cc", "Mailbox::go_on_sending", "Region::fence()")
_WRITE = ("mailbox_sending.cc", "Mailbox::write_parts")
WRITE_FIRST_TAKEN = Site(*_WRITE, "progress.taken.load(")
WRITE_TAKEN = Site(*_WRITE, "progress.taken.load(", "relax()")
WRITE_WRITTEN = Site(*_WRITE, "progress.written.store(")

_NEWS = ("mailbox_receiving.cc", "Mailbox::has_news")
NEWS_SEQUENCE = Site(*_NEWS, "sequence.load(")
NEWS_PUBLISHED = Site(*_NEWS, "published(source).load(")
MATCH_PUBLISHED = Site("mailbox_receiving.cc", "Mailbox::match", "published(source).load(")
_EXPECTED = ("mailbox_receiving.cc", "Mailbox::find_expected")
EXPECTED_ORDINAL = Site(*_EXPECTED, "ordinal.load(")
EXPECTED_TAG = Site(*_EXPECTED, "tag.load(")
_THERE = ("outboxes.cc", "Outboxes::sequence_for")
THERE_SEQUENCE = Site(*_THERE, "candidate.sequence.load(")
THERE_TO = Site(*_THERE, "candidate.to.load(")
THERE_ORDINAL = Site(*_THERE, "candidate.ordinal.load(")
THERE_FENCE = Site(*_THERE, "std::atomic_thread_fence(")
THERE_AGAIN = Site(*_THERE, "candidate.sequence.load(", "std::atomic_thread_fence(")
_FIND = ("outboxes.cc", "Outboxes::find")
FIND_TAG = Site(*_FIND, "candidate.tag.load(")
FIND_REQUEST = Site(*_FIND, "candidate.request.load(")
_RELEASE = ("mailbox_receiving.cc", "Mailbox::release")
RELEASE_ORDINAL = Site(*_RELEASE, "from.ordinal.load(")
RELEASE_SEQUENCE = Site(*_RELEASE, "from.sequence.store(")
RELEASE_TAKEN = Site(*_RELEASE, ".store(ordinal + 1")
RELEASE_FENCE = Site(*_RELEASE, "Region::fence()")
TAKE_IN_REQUEST = Site("stash.cc", "Stash::take_in_from", "from.request.load(")
TAKE_IN_MATCHED = Site("stash.cc", "Stash::take_in_from", "from.request.store(")
_TAKE = ("mailbox_receiving.cc", "Mailbox::take_parts")
TAKE_WRITTEN = Site(*_TAKE, "progress.written.load(")
TAKE_TAKEN = Site(*_TAKE, "progress.taken.store(")
TAKE_FENCE = Site(*_TAKE, "Region::fence()")

SENDER = 0
NONE, MATCHED = 0, 1  # Request


def put(slot: int, to: int, tag: int, ordinal: int, sequence: int) -> Generator[Step, int, None]:
    """Mailbox::put, and what Mailbox::send does then."""
    yield Store(f"sequence{slot}", PUT_CLEAR, 0)
    yield Fence(site=PUT_FENCE)
    yield Store(f"to{slot}", PUT_TO, to)
    yield Store(f"tag{slot}", PUT_TAG, tag)
    yield Write(f"message{slot}", value=sequence)
    yield Store(f"ordinal{slot}", PUT_ORDINAL, ordinal)
    yield Store(f"request{slot}", PUT_REQUEST, NONE)
    yield Store(f"sequence{slot}", PUT_SEQUENCE, sequence)
    yield Store("published", PUT_PUBLISHED, sequence)
    yield Fence(site=SEND_FENCE)
    yield from wake(to)


def _signs_of_room(users: tuple[tuple[int, int], ...]) -> Iterator[Looked]:
    """Mailbox::look_at."""
    for slot, (user, ordinal) in enumerate(users):
        yield f"taken{user}", LOOK_AT_TAKEN, above(ordinal)
        yield f"sequence{slot}", LOOK_AT_SEQUENCE, equals(0)


def sender(messages: tuple[tuple[int, int], ...], envelopes: int) -> Program:
    """Sends each message (to, tag) in turn, as soon as there is room; Mailbox::room_for."""
    users = ((0, 0),) * envelopes  # who has it, or 0; its ordinal
    ordinals: tuple[int, ...] = (0, 0, 0)
    for number, (to, tag) in enumerate(messages):
        slot = number % envelopes
        if users[slot][0] != 0:
            slot = (yield Look(options=tuple(_signs_of_room(users)))) // 2
        yield from put(slot, to, tag, ordinals[to], number + 1)
        users = (*users[:slot], (to, ordinals[to]), *users[slot + 1 :])
        ordinals = (*ordinals[:to], ordinals[to] + 1, *ordinals[to + 1 :])


def sequence_for(to: int, slot: int, taken: int) -> Generator[Step, int, int]:
    """Outboxes::sequence_for, by that rank itself; `taken` is what it has said last."""
    sequence = yield Load(f"sequence{slot}", THERE_SEQUENCE)
    if sequence == 0 or (yield Load(f"to{slot}", THERE_TO)) != to:
        return 0
    ordinal = yield Load(f"ordinal{slot}", THERE_ORDINAL)
    yield Fence(site=THERE_FENCE)
    if (yield Load(f"sequence{slot}", THERE_AGAIN)) != sequence:
        return 0
    return 0 if ordinal < taken else sequence


def find(to: int, tag: int, taken: int, limit: int, envelopes: int) -> Generator[Step, int, int]:
    found = -1
    for slot in range(envelopes):
        sequence = yield from sequence_for(to, slot, taken)
        if sequence == 0 or sequence >= limit:
            continue
        if (yield Load(f"tag{slot}", FIND_TAG)) != tag:
            continue
        if (yield Load(f"request{slot}", FIND_REQUEST)) != NONE:
            continue
        found, limit = slot, sequence
    return found


def waiting_for(rank: int, taken: int, envelopes: int) -> Generator[Step, int, int]:
    count = 0
    for slot in range(envelopes):
        count += (yield from sequence_for(rank, slot, taken)) != 0
    return count


def release(
    rank: int, slot: int, taken: int, envelopes: int, awaited: bool = False
) -> Generator[Step, int, int]:
    """Mailbox::release; returns what the rank says that it has taken."""
    ordinal = yield Load(f"ordinal{slot}", RELEASE_ORDINAL)
    in_turn = ordinal == taken or (yield from waiting_for(rank, taken, envelopes)) == 1
    if not in_turn or awaited:
        yield Store(f"sequence{slot}", RELEASE_SEQUENCE, 0)
    if in_turn:
        taken = ordinal + 1
        yield Store(f"taken{rank}", RELEASE_TAKEN, taken)
    if awaited:
        yield Fence(site=RELEASE_FENCE)
    yield from wake(SENDER)
    return taken


def receiver(
    rank: int, wanted: tuple[tuple[int, int], ...], envelopes: int, sleeps: bool, takes_in: bool
) -> Program:
    """Receives by tag, and expects that message. Mailbox::step, then, in vain, Mailbox::advance."""
    taken = 0
    seen = 0
    expected = 0  # the slot
    item_seen = 0
    slot = -1
    stashed: tuple[tuple[int, int], ...] = ()
    tag = message = 0

    def find_expected() -> Generator[Step, int, None]:
        nonlocal slot, seen
        sequence = yield from sequence_for(rank, expected, taken)
        if sequence == 0 or (yield Load(f"ordinal{expected}", EXPECTED_ORDINAL)) != taken:
            return
        if (yield Load(f"tag{expected}", EXPECTED_TAG)) == tag:
            slot, seen = expected, sequence

    def match() -> Generator[Step, int, bool]:
        nonlocal slot, seen, item_seen
        limit = 1 + (yield Load("published", MATCH_PUBLISHED))
        if limit == item_seen:
            return False
        item_seen = limit
        seen = limit - 1
        known = tuple(each[1] for each in stashed if each[0] == tag)
        slot = yield from find(rank, tag, taken, min((limit, *known)), envelopes)
        return slot >= 0 or known != ()

    def take_in() -> Generator[Step, int, None]:
        """If all envelopes are for this rank."""
        nonlocal stashed, taken
        if (yield from waiting_for(rank, taken, envelopes)) < envelopes:
            return
        for each in range(envelopes):
            if (yield from sequence_for(rank, each, taken)) == 0:
                continue
            if (yield Load(f"request{each}", TAKE_IN_REQUEST)) != NONE:
                continue
            yield Store(f"request{each}", TAKE_IN_MATCHED, MATCHED)
            which = yield Load(f"tag{each}", FIND_TAG)
            stashed += ((which, (yield Read(f"message{each}"))),)
            taken = yield from release(rank, each, taken, envelopes)

    for tag, message in wanted:
        slot = -1
        item_seen = 0
        if not (sleeps or takes_in):
            yield Look(
                options=(
                    (f"sequence{expected}", NEWS_SEQUENCE, above(seen)),
                    ("published", NEWS_PUBLISHED, above(seen)),
                ),
                value=1,
            )
            yield from find_expected()
        if slot < 0 and sleeps:
            yield from wait(rank, match)
        has_it = slot >= 0
        while not has_it:
            what = yield Look(
                options=(
                    ("published", MATCH_PUBLISHED, above(item_seen - 1)),
                    *((("sequence0", THERE_SEQUENCE, above(0)),) * takes_in),
                )
            )
            if what == 0:
                has_it = yield from match()
            else:
                yield from take_in()
        if slot >= 0:
            check((yield Read(f"message{slot}")) == message, "another message than was awaited")
            taken = yield from release(rank, slot, taken, envelopes)
            expected = (slot + 1) % envelopes
        else:
            first = min(each for each in stashed if each[0] == tag)
            check(first[1] == message, "another message was taken in than was awaited")
            stashed = tuple(each for each in stashed if each != first)


def _locations(envelopes: int, receivers: tuple[int, ...]) -> dict[str, int]:
    fields = ("sequence", "to", "tag", "ordinal", "request")
    return {
        "published": 0,
        **{f"{field}{slot}": 0 for slot in range(envelopes) for field in fields},
        **{f"taken{rank}": 0 for rank in receivers},
        **waiting.atomics(SENDER, *receivers),
    }


def _messages(envelopes: int) -> tuple[str, ...]:
    return tuple(f"message{slot}" for slot in range(envelopes))


def mail(
    name: str,
    tags: tuple[int, ...],
    wanted: tuple[tuple[int, int], ...],
    envelopes: int,
    sleeps: bool = False,
    takes_in: bool = False,
) -> Scenario:
    """`wanted`: the tag of each receive, and which message it must get."""
    messages = tuple((1, tag) for tag in tags)
    return Scenario(
        name,
        (
            ("sender", lambda: sender(messages, envelopes)),
            ("receiver", lambda: receiver(1, wanted, envelopes, sleeps, takes_in)),
        ),
        _locations(envelopes, (1,)),
        _messages(envelopes),
    )


def two_receivers() -> Scenario:
    """An envelope that is used for one rank and then for another, as one of them looks at it."""
    return Scenario(
        "an envelope for two receivers",
        (
            ("sender", lambda: sender(((1, 7), (2, 7)), 1)),
            ("first", lambda: receiver(1, ((7, 1),), 1, False, False)),
            ("second", lambda: receiver(2, ((7, 2),), 1, False, False)),
        ),
        _locations(1, (1, 2)),
        _messages(1),
    )


def parts(lengths: tuple[int, ...], room: int, sleeper: int | None) -> Scenario:
    """Messages of so many parts, through a block with room for so many; one end may sleep.

    The first part is there when the envelope is; what fits into the block is not counted as taken.
    """

    def until(rank: int, at: str, site: Site, wanted: Callable[[int], bool]) -> Program:
        def look() -> Generator[Step, int, bool]:
            return wanted((yield Load(at, site)))

        if rank == sleeper:
            yield from wait(rank, look)
        else:
            yield Look(options=((at, site, wanted),))

    def copies_in() -> Program:
        for number, length in enumerate(lengths):
            before = yield Load("written", PUT_WRITTEN)
            if length > room and (yield Load("parts taken", PUT_TAKEN)) != before:
                yield Store("parts taken", PUT_RESET, before)
            yield Write(f"block{before % room}", value=before)
            yield Write("envelope", value=before)
            yield Store("sequence", PUT_SEQUENCE, number + 1)
            yield Fence(site=SEND_FENCE)
            yield from wake(1)
            site = WRITE_FIRST_TAKEN
            for written in range(before + 1, before + length):
                if length > room:
                    yield from until(SENDER, "parts taken", site, above(written - room))
                    site = WRITE_TAKEN
                yield Write(f"block{written % room}", value=written)
                yield Store("written", WRITE_WRITTEN, written + 1)
                yield Fence(site=GO_ON_FENCE)
                yield from wake(1)
            yield from until(SENDER, "sequence", IS_RECEIVED, equals(0))

    def copies_out() -> Program:
        for number, length in enumerate(lengths):
            yield from until(1, "sequence", THERE_SEQUENCE, above(number))
            yield Fence(site=THERE_FENCE)
            taken = yield Read("envelope")
            for part in range(length):
                if part > 0:
                    yield from until(1, "written", TAKE_WRITTEN, above(taken))
                check((yield Read(f"block{taken % room}")) == taken, "another part than is next")
                taken += 1
                if length > room:
                    yield Store("parts taken", TAKE_TAKEN, taken)
                if part < length - 1:
                    yield Fence(site=TAKE_FENCE)
                    yield from wake(SENDER)
            yield Store("sequence", RELEASE_SEQUENCE, 0)
            yield Fence(site=RELEASE_FENCE)
            yield from wake(SENDER)

    who = {None: "nobody sleeps", SENDER: "the sender sleeps", 1: "the receiver sleeps"}[sleeper]
    return Scenario(
        f"messages of {lengths} parts, {who}",
        (("sender", copies_in), ("receiver", copies_out)),
        {"sequence": 0, "written": 0, "parts taken": 0, **waiting.atomics(SENDER, 1)},
        ("envelope", *(f"block{part}" for part in range(room))),
    )


SCENARIOS = (
    mail("mail for a sleeper", (7,), ((7, 1),), 1, sleeps=True),
    mail("mail in turn", (7, 7), ((7, 1), (7, 2)), 1),
    mail("mail out of turn", (7, 8, 7), ((8, 2), (7, 1), (7, 3)), 2),
    mail("mail that is taken in", (7, 8), ((8, 2), (7, 1)), 1, takes_in=True),
    two_receivers(),
    parts((3, 2), 1, None),
    parts((2, 3), 2, None),
    parts((2,), 1, SENDER),
    parts((2,), 1, 1),
)
