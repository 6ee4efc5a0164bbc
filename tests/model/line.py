"""The line (channel.h, channel.cc): data, then their number; then room again, when all have read.

And the bell that goes with it: who publishes looks for sleepers, who goes to sleep looks once more.
"""

from __future__ import annotations

from collections.abc import Generator

from tests.model import waiting
from tests.model.code import Site
from tests.model.steps import (
    Fence,
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

PUBLISH = Site("channel.h", "Channel::publish", "line.sequence.store(")
PUBLISH_FENCE = Site("channel.h", "Channel::publish", "Region::fence()", "line.sequence.store(")
PEEK = Site("channel.h", "Channel::peek", "source.sequence.load(")
SET_PROGRESS = Site("channel.h", "set_progress", "progress->value.store(")
LINE_TAKEN = Site("channel.h", "Channel::is_taken_cached", "progress->value.load(")
RING_TAKEN = Site("channel.cc", "Channel::is_taken", "progress->value.load(")
WAKE_SENDERS = Site("lane_runner.cc", "LaneRunner::wake_senders", "Region::fence()")


def publish(sender: int, number: int, to: tuple[int, ...]) -> Generator[Step, int, None]:
    """Channel::publish, and before it the copy into the line."""
    yield Write(f"line{sender}", value=number)
    yield Store(f"sequence{sender}", PUBLISH, number)
    yield Fence(site=PUBLISH_FENCE)
    for rank in to:
        yield from wake(rank)


def peek(sender: int, number: int) -> Generator[Step, int, bool]:
    return (yield Load(f"sequence{sender}", PEEK)) == number


def many_receivers() -> Scenario:
    """One line, which two ranks read; both must have before it is used again."""

    def sender() -> Program:
        for number in (1, 2):
            for receiver in (1, 2) if number > 1 else ():  # Channel::reserve
                yield Look(options=((f"progress{receiver}", LINE_TAKEN, above(0)),))
            yield Write("line0", value=number)
            yield Store("sequence0", PUBLISH, number)

    def receiver(rank: int) -> Program:
        for number in (1, 2):
            yield Look(options=(("sequence0", PEEK, equals(number)),))
            check((yield Read("line0")) == number, "another message than was awaited")
            yield Store(f"progress{rank}", SET_PROGRESS, number)

    return Scenario(
        "a line for two receivers",
        (("sender", sender), ("first", lambda: receiver(1)), ("second", lambda: receiver(2))),
        {"sequence0": 0, "progress1": 0, "progress2": 0},
        ("line0",),
    )


def full_ring() -> Scenario:
    """Both ends sleep: the receiver for a message, the sender for room in its ring."""

    def sender() -> Program:
        def is_taken() -> Generator[Step, int, bool]:
            return (yield Load("progress1", RING_TAKEN)) >= 1

        yield from publish(0, 1, (1,))
        yield from wait(0, is_taken)
        yield from publish(0, 2, (1,))

    def receiver() -> Program:
        for number in (1, 2):

            def has_come(number: int = number) -> Generator[Step, int, bool]:
                return peek(0, number)

            yield from wait(1, has_come)
            check((yield Read("line0")) == number, "another message than was awaited")
            yield Store("progress1", SET_PROGRESS, number)
            yield Fence(site=WAKE_SENDERS)
            yield from wake(0)

    return Scenario(
        "a full ring",
        (("sender", sender), ("receiver", receiver)),
        {"sequence0": 0, "progress1": 0, **waiting.atomics(0, 1)},
        ("line0",),
    )


def two_senders() -> Scenario:
    """Who waits for two messages may be woken by either, and must not miss the other's bell."""

    def sender(rank: int) -> Program:
        yield from publish(rank, 1, (0,))

    def receiver() -> Program:
        def gather() -> Generator[Step, int, bool]:  # LaneRunner::gather
            return (yield from peek(1, 1)) and (yield from peek(2, 1))

        yield from wait(0, gather)
        for rank in (1, 2):
            check((yield Read(f"line{rank}")) == 1, "a message without its payload")

    return Scenario(
        "two senders",
        (("receiver", receiver), ("first", lambda: sender(1)), ("second", lambda: sender(2))),
        {"sequence1": 0, "sequence2": 0, **waiting.atomics(0)},
        ("line1", "line2"),
    )


SCENARIOS = (many_receivers(), full_ring(), two_senders())
