"""What an event loop calls in one turn."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator

import pytest

from rallypoint.base.ready import call_ready


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
