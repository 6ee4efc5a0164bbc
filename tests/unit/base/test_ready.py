"""What an event loop calls in one turn."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterator

import pytest

from rallypoint.base.ready import call_ready, earliest, left_until


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


def ready_pipes(count: int) -> list[int]:
    """The ends to read of so many pipes, in each of which there is a byte."""
    found = []
    for _ in range(count):
        given, written = os.pipe()
        os.write(written, b"x")
        os.close(written)
        found.append(given)
    return found


@pytest.mark.parametrize("is_reused", [False, True])
def test_what_another_one_has_closed_is_not_called(
    selector: selectors.BaseSelector, is_reused: bool
) -> None:
    """Whichever comes first ends all others; so does a worker's end its output's readers."""
    called = []
    left = ready_pipes(5)

    def end_others(own: int) -> None:
        called.append(os.read(own, 1))
        for each in set(left) - {own}:
            selector.unregister(each)
            os.close(each)
            if is_reused:  # by something else that is ready
                selector.register(ready_pipes(1)[0], selectors.EVENT_READ, late.append)
        left[:] = [own]

    late: list[object] = []
    for each in list(left):
        selector.register(each, selectors.EVENT_READ, lambda own=each: end_others(own))
    call_ready(selector, 1.0)
    assert called == [b"x"]
    assert late == []
    for key in list(selector.get_map().values()):
        os.close(key.fd)


def test_all_others_are_called(selector: selectors.BaseSelector) -> None:
    called = []
    pipes = ready_pipes(3)
    for each in pipes:
        selector.register(each, selectors.EVENT_READ, lambda own=each: called.append(own))
    call_ready(selector, 1.0)
    assert sorted(called) == sorted(pipes)
    for each in pipes:
        os.close(each)


def test_the_earliest_alarm_is_the_first_that_is_set() -> None:
    assert earliest(3.0, None, 2.0) == 2.0
    assert earliest(None) is None


def test_how_long_to_wait_ends_at_the_alarm() -> None:
    assert left_until(None) is None
    assert left_until(time.monotonic() - 1) == 0
    left_s = left_until(time.monotonic() + 60)
    assert left_s is not None
    assert 59 < left_s <= 60
