"""Line, bell, mailbox and trouble: nothing goes wrong in any execution, on x86 or weaker machines.

With any order of the code weakened, something does (docs/decisions/071-model.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.model import code, line, mailbox, trouble
from tests.model.code import Order, Site
from tests.model.explore import Outcome, explore
from tests.model.memory import Tso, Weak
from tests.model.steps import (
    Fence,
    Load,
    Look,
    Program,
    Read,
    Scenario,
    Store,
    Write,
    check,
    equals,
)
from tests.model.waiting import ARM_BELL, ARM_FENCE, ARM_SLEEPING, DISARM, RING

SCENARIOS = {each.name: each for part in (line, mailbox, trouble) for each in part.SCENARIOS}

# What the code orders more strictly than these protocols need, and why it does no harm.
NOT_NEEDED = {
    ARM_BELL: "the fence before the next look orders as much",
    ARM_SLEEPING: "the fence after it orders as much",
    DISARM: "who is rung without need only looks once more",
    RING: "the fence before it releases as well",
    mailbox.THERE_SEQUENCE: "the fence before the second look acquires what the first one saw",
    mailbox.TAKE_IN_MATCHED: "it is for those who look for circles",
    trouble.POISONED: "one word says it all, and the details have an order of their own",
    trouble.BLAME: "as for poisoned()",
    trouble.PRESENCE: "between the two looks lies FUTEX_WAIT",
}
NOT_NEEDED_ON_X86 = {
    ARM_FENCE: "it comes after a read-modify-write",
    trouble.END_FENCE: "the blame itself is a read-modify-write",
}


def weakest(site: Site, order: Order) -> Order:
    """Of a full fence, one that only acquires and releases; of others, nothing."""
    if not site.is_fence:
        return Order.RELAXED
    return Order.ACQ_REL if order is Order.SEQ_CST else Order.NONE


@cache
def outcome(name: str) -> Outcome:
    return explore(SCENARIOS[name], Weak, Site.order)


@cache
def sites() -> dict[Site, list[str]]:
    """Those that order anything, and the scenarios that have them, the smallest ones first."""
    found: dict[Site, list[str]] = {}
    for name in sorted(SCENARIOS, key=lambda name: outcome(name).states):
        for site in outcome(name).sites:
            if site.order() is not Order.RELAXED:
                found.setdefault(site, []).append(name)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_goes_wrong(name: str) -> None:
    for found in (outcome(name), explore(SCENARIOS[name], Tso, Site.order)):
        if found.trouble:
            pytest.fail(str(found), pytrace=False)


@pytest.mark.slow
def test_each_order_is_needed() -> None:
    def goes_unnoticed(site: Site) -> bool:
        return not any(explore(SCENARIOS[name], Weak, _but(site)).trouble for name in sites()[site])

    assert [str(site) for site in sites() if site not in NOT_NEEDED and goes_unnoticed(site)] == []


def _but(weakened: Site) -> Callable[[Site], Order]:
    def order(site: Site) -> Order:
        return weakest(site, site.order()) if site == weakened else site.order()

    return order


@pytest.mark.slow
def test_what_is_not_needed_is_not() -> None:
    def order(site: Site) -> Order:
        return weakest(site, site.order()) if site in NOT_NEEDED else site.order()

    assert set(NOT_NEEDED) <= set(sites())
    for name, scenario in SCENARIOS.items():
        weakened = explore(scenario, Weak, order)
        if weakened.trouble:
            pytest.fail(f"{name}:\n{weakened}", pytrace=False)


def test_x86_needs_the_full_fences() -> None:
    for site, names in sites().items():
        if site.order() is Order.SEQ_CST and site.is_fence:
            found = any(explore(SCENARIOS[name], Tso, _but(site)).trouble for name in names)
            assert found == (site not in NOT_NEEDED_ON_X86), site


# --- The machines, by what is known of them (herd7's names).

X = Site("", "", "x")
Y = Site("", "", "y")
FENCE = Site("", "", "fence()")


def litmus(*programs: Callable[[], Program], data: tuple[str, ...] = ()) -> Scenario:
    numbered = tuple((str(number), program) for number, program in enumerate(programs))
    return Scenario("litmus", numbered, {"x": 0, "y": 0, "p": 0, "q": 0}, data)


def store_buffering() -> Scenario:
    """SB: each stores to one location, and loads the other."""

    def one(mine: str, theirs: str, said: str) -> Program:
        yield Store(mine, X, 1)
        yield Fence(site=FENCE)
        if (yield Load(theirs, X)) == 0:
            yield Store(said, X, 1)

    def both() -> Program:
        yield Look(options=(("p", Y, equals(1)),), value=1)
        p = yield Load("p", Y)
        q = yield Load("q", Y)
        check(p + q < 2, "both")

    return litmus(lambda: one("x", "y", "p"), lambda: one("y", "x", "q"), both)


def message_passing(is_data: bool) -> Scenario:
    """MP."""

    def sender() -> Program:
        yield Write("data", value=1) if is_data else Store("x", value=1)
        yield Store("y", X, 1)

    def receiver() -> Program:
        yield Look(options=(("y", Y, equals(1)),))
        got = yield Read("data") if is_data else Load("x")
        check(got == 1, "stale")

    return litmus(sender, receiver, data=("data",) if is_data else ())


def coherence() -> Scenario:
    """CoRR: nobody sees a location go back."""

    def writer() -> Program:
        yield Store("x", X, 1)
        yield Store("x", X, 2)

    def reader() -> Program:
        first = yield Load("x", Y)
        second = yield Load("x", Y)
        check(first <= second, "back")

    return litmus(writer, reader)


def independent_reads() -> Scenario:
    """IRIW: two readers may disagree on which of two stores came first."""

    def reader(one: str, other: str, said: str) -> Program:
        yield Look(options=((one, Y, equals(1)),))
        yield Fence(site=FENCE)
        if (yield Load(other, Y)) == 0:
            yield Store(said, X, 1)

    def both() -> Program:
        yield Look(options=(("p", Y, equals(1)),), value=1)
        p = yield Load("p", Y)
        q = yield Load("q", Y)
        check(p + q < 2, "both")

    def writer(at: str) -> Program:
        yield Store(at, X, 1)

    readers = (lambda: reader("x", "y", "p"), lambda: reader("y", "x", "q"))
    return litmus(lambda: writer("x"), lambda: writer("y"), *readers, both)


R, A, L, S = Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.SEQ_CST


@pytest.mark.parametrize(
    ("scenario", "machine", "x", "y", "fence", "is_possible"),
    [
        (store_buffering(), Tso, R, R, Order.NONE, True),
        (store_buffering(), Tso, R, R, S, False),
        (store_buffering(), Weak, L, A, Order.ACQ_REL, True),
        (store_buffering(), Weak, R, R, S, False),
        (message_passing(False), Tso, R, R, S, False),
        (message_passing(False), Weak, R, A, S, True),
        (message_passing(False), Weak, L, R, S, True),
        (message_passing(False), Weak, L, A, S, False),
        (message_passing(True), Weak, R, A, S, True),
        (message_passing(True), Weak, L, R, S, True),
        (message_passing(True), Weak, L, A, S, False),
        (coherence(), Tso, R, R, S, False),
        (coherence(), Weak, R, R, S, False),
        (independent_reads(), Tso, R, R, Order.NONE, False),
        (independent_reads(), Weak, L, A, Order.NONE, True),
        (independent_reads(), Weak, R, R, S, False),
    ],
)
def test_litmus(
    scenario: Scenario,
    machine: type[Tso] | type[Weak],
    x: Order,
    y: Order,
    fence: Order,
    is_possible: bool,
) -> None:
    orders = {X: x, Y: y, FENCE: fence}
    found: Outcome
    if machine is Tso:
        found = explore(scenario, Tso, orders.__getitem__)
    else:
        found = explore(scenario, Weak, orders.__getitem__)
    assert bool(found.trouble) == is_possible, str(found)


def test_a_weaker_order_in_the_code_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model takes its orders from the source, and says where it no longer fits."""
    text = (code.ENGINE / "channel.h").read_text()
    (tmp_path / "channel.h").write_text(
        text.replace(
            "line.sequence.store(sequence(iteration, send.ordinal), std::memory_order_release)",
            "line.sequence.store(sequence(iteration, send.ordinal), std::memory_order_relaxed)",
        ).replace("source.sequence.load(", "source.number.load(")
    )
    monkeypatch.setattr(code, "ENGINE", tmp_path)
    code.body.cache_clear()
    try:
        assert line.PUBLISH.order() is Order.RELAXED
        with pytest.raises(LookupError, match="Channel::peek"):
            line.PEEK.order()
    finally:
        code.body.cache_clear()
