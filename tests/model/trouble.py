"""Trouble (region.cc, trouble_observer.cc, lane_runner_memory.cc).

Who finds it tells all, and may be killed while it does; what others then read of it, or of its
memory, is whole.
"""

from __future__ import annotations

from collections.abc import Generator

from tests.model import waiting
from tests.model.code import Site
from tests.model.line import PEEK, PUBLISH, RING_TAKEN, peek, publish
from tests.model.steps import (
    Add,
    CompareExchange,
    Fence,
    IsDead,
    Load,
    Look,
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

BLAME = Site("region.cc", "Region::begin_poison", "compare_exchange_strong(")
COMPLETE = Site("region.cc", "Region::end_poison", "is_complete.store(")
END_FENCE = Site("region.cc", "Region::end_poison", "fence()", "is_complete.store(")
BLAME_FENCE = Site("region.cc", "Region::begin_poison", "std::atomic_thread_fence(")
POISONED = Site("region.h", "poisoned", "blame.load(")
POISONED_FENCE = Site("region.h", "poisoned", "std::atomic_thread_fence(")
WORK_FENCE = Site("work.h", "trouble", "std::atomic_thread_fence(")
FINISH = Site("progress_thread.cc", "Work::finish", "state_.exchange(")
IS_DONE = Site("work.h", "is_done", "state_.load(")
AWAIT_DETAILS = Site("region.cc", "Region::await_details", "is_complete.load(")

LEAVE = Site("region.cc", "Region::leave", "presence.store(")
LEAVE_FENCE = Site("region.cc", "Region::leave", "fence()", "presence.store(")
PRESENCE = Site("region.h", "presence", "presence.load(")

IS_GOOD = Site("lane_runner_memory.cc", "LaneRunner::is_good", "std::atomic_thread_fence(")

_RECORD = ("trouble_observer.cc", "TroubleObserver::record")
CLEAR_RECORD = Site(*_RECORD, "record.number.store(0")
RECORD_FENCE = Site(*_RECORD, "std::atomic_thread_fence(")
RECORD_SIGNATURE = Site(*_RECORD, "record.signature.store(")
RECORD_NUMBER = Site(*_RECORD, "record.number.store(channel_")
_BLOCKED = ("trouble_observer.cc", "TroubleObserver::is_blocked_by_mismatch")
LOOK_NUMBER = Site(*_BLOCKED, "theirs.number.load(")
LOOK_SIGNATURE = Site(*_BLOCKED, "theirs.signature.load(")
LOOK_FENCE = Site(*_BLOCKED, "std::atomic_thread_fence(")
LOOK_AGAIN = Site(*_BLOCKED, "theirs.number.load(", "std::atomic_thread_fence(")

POISON = {"blame": 0, "complete": 0}


def spread(trouble: int, others: tuple[int, ...]) -> Generator[Step, int, None]:
    """Region::spread."""
    before = yield CompareExchange("blame", BLAME, trouble, expected=0)
    yield Fence(site=BLAME_FENCE)
    if before != 0:
        return
    yield Write("details", value=trouble)
    yield Store("complete", COMPLETE, 1)
    yield Fence(site=END_FENCE)
    for rank in others:
        yield from wake(rank)


def poisoned() -> Generator[Step, int, bool]:
    if (yield Load("blame", POISONED)) == 0:
        return False
    yield Fence(site=POISONED_FENCE)
    return True


def survive(rank: int, others: tuple[int, ...], may_be_killed: int | None) -> Program:
    """Waits for a message that never comes, until it is told why, or sees that itself."""

    def look() -> Generator[Step, int, bool]:
        return (yield Load("sequence", PEEK)) == 1

    def look_for_trouble() -> Generator[Step, int, bool]:  # TroubleObserver::look
        if (yield from poisoned()):
            return True
        if may_be_killed is None or not (yield IsDead(value=may_be_killed)):
            return False
        yield from spread(100 + rank, others)
        return True

    yield from wait(rank, look, look_for_trouble, timed=may_be_killed is not None)
    yield from read_details()


def read_details() -> Program:
    """Region::await_details, and what is done with them."""
    blame = yield Load("blame", POISONED)
    check(blame != 0, "there is no trouble")
    gives_up = yield Look(options=(("complete", AWAIT_DETAILS, equals(1)),), value=1)
    if gives_up == 0:
        check((yield Read("details")) == blame, "the details of another trouble")


def reporter() -> Scenario:
    """Who sleeps is woken."""
    return Scenario(
        "a reporter",
        (("reporter", lambda: spread(1, (1,))), ("other", lambda: survive(1, (), None))),
        {"sequence": 0, **POISON, **waiting.atomics(1)},
        ("details",),
    )


def mortal_reporter() -> Scenario:
    """One rank is killed while it reports; one sleeps, one does not, and either may report that."""

    def awake() -> Program:
        if (yield Look(options=(("blame", POISONED, above(0)),), value=1)) != 0:
            check((yield IsDead(value=0)) != 0, "nobody reports")
            yield from spread(102, (1,))
        yield from read_details()

    return Scenario(
        "a reporter that may be killed",
        (
            ("reporter", lambda: spread(1, (1,))),
            ("sleeper", lambda: survive(1, (), 0)),
            ("other", awake),
        ),
        {"sequence": 0, **POISON, **waiting.atomics(1)},
        ("details",),
        frozenset({0}),
    )


def two_reporters() -> Scenario:
    """One comes first; the other, too, reads what that one says."""

    def report(rank: int) -> Program:
        yield from spread(rank, ())
        yield from survive(rank, (), None)

    return Scenario(
        "two reporters",
        (("first", lambda: report(1)), ("second", lambda: report(2))),
        {"sequence": 0, **POISON, **waiting.atomics(1, 2)},
        ("details",),
    )


def memory_given_back(how: str) -> Scenario:
    """A message is read in its sender's memory, which its program overwrites after an error.

    It gets it back from the thread that saw the error or reported it, perhaps as the second to do
    so, or from another one that heard of it.
    """

    def carry_out() -> Program:
        def is_taken() -> Generator[Step, int, bool]:
            return (yield Load("progress1", RING_TAKEN)) == 1

        def look_for_trouble() -> Generator[Step, int, bool]:
            if how == "reports":
                yield from spread(1, ())
                return True
            return (yield from poisoned())

        yield from publish(0, 1, ())
        yield from wait(0, is_taken, look_for_trouble)
        if how == "hears":
            yield Write("trouble", value=1)
            yield Add("state", FINISH, 1)
        else:
            yield Store("memory", value=2)

    def program() -> Program:
        yield Look(options=(("state", IS_DONE, equals(1)),))
        yield Read("trouble")
        yield Fence(site=WORK_FENCE)
        yield Store("memory", value=2)

    def receiver() -> Program:
        yield Look(options=(("sequence0", PEEK, equals(1)),))
        yield Read("line0")
        read = yield Load("memory")
        yield Fence(site=IS_GOOD)
        if not (yield from poisoned()):
            check(read == 1, "uses what was no longer the message")
            yield Store("progress1", value=1)

    def other() -> Program:
        yield from spread(2, (0,))

    programs = [("sender", carry_out), ("receiver", receiver), ("other", other)]
    if how == "hears":
        programs.append(("the sender's program", program))
    return Scenario(
        f"memory given back by who {how} it",
        tuple(programs),
        {
            **{"sequence0": 0, "progress1": 0, "memory": 1, "state": 0},
            **POISON,
            **waiting.atomics(0),
        },
        ("line0", "details", "trouble"),
    )


def leaves() -> Scenario:
    """Who leaves has sent its last message just before: that is not missing."""

    def leaver() -> Program:
        yield Write("line1", value=1)
        yield Store("sequence1", PUBLISH, 1)
        yield Store("presence", LEAVE, 2)
        yield Fence(site=LEAVE_FENCE)
        yield from wake(0)

    def receiver() -> Program:
        was_gone = False

        def look_for_trouble() -> Generator[Step, int, bool]:
            nonlocal was_gone
            has_left = (yield Load("presence", PRESENCE)) == 2
            if was_gone and has_left:
                return True
            was_gone = has_left
            return False

        has_come = yield from wait(0, lambda: peek(1, 1), look_for_trouble, timed=True)
        check(has_come, "blames who left, whose message is there")
        yield Read("line1")

    return Scenario(
        "a rank that leaves",
        (("leaver", leaver), ("receiver", receiver)),
        {"sequence1": 0, "presence": 1, **waiting.atomics(0)},
        ("line1",),
    )


def is_left_alone() -> Scenario:
    """Who waits for somebody that leaves is woken."""

    def leaver() -> Program:
        yield Store("presence", LEAVE, 2)
        yield Fence(site=LEAVE_FENCE)
        yield from wake(0)

    def receiver() -> Program:
        def look_for_trouble() -> Generator[Step, int, bool]:
            return (yield Load("presence", PRESENCE)) == 2

        yield from wait(0, lambda: peek(1, 1), look_for_trouble)

    return Scenario(
        "a rank that is left alone",
        (("leaver", leaver), ("receiver", receiver)),
        {"sequence1": 0, "presence": 1, **waiting.atomics(0)},
    )


def call_records() -> Scenario:
    """A record of a call is overwritten by a later one, while a peer compares it with its own."""

    def caller() -> Program:
        for number in (1, 2):
            yield Store("number", CLEAR_RECORD, 0)
            yield Fence(site=RECORD_FENCE)
            yield Store("signature", RECORD_SIGNATURE, number)
            yield Store("number", RECORD_NUMBER, number)

    def peer() -> Program:
        for number in (1, 2):
            if (yield Load("number", LOOK_NUMBER)) != number:
                continue
            signature = yield Load("signature", LOOK_SIGNATURE)
            yield Fence(site=LOOK_FENCE)
            if (yield Load("number", LOOK_AGAIN)) == number:
                check(signature == number, "takes one call for another")

    return Scenario(
        "records of calls", (("caller", caller), ("peer", peer)), {"number": 0, "signature": 0}
    )


SCENARIOS = (
    reporter(),
    mortal_reporter(),
    two_reporters(),
    memory_given_back("sees"),
    memory_given_back("reports"),
    memory_given_back("hears"),
    leaves(),
    is_left_alone(),
    call_records(),
)
