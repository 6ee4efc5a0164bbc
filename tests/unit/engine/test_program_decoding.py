"""The native decoder refuses every malformed program, and crashes on none."""

from __future__ import annotations

import os
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint._native import Communicator, region_bytes
from rallypoint.schedule.catalogue import build
from rallypoint.schedule.encode import encode
from rallypoint.schedule.program import Collective

GOOD = array("i", encode(build(Collective.ALL_REDUCE, "direct_two_shot", ranks=4), 1))


def teach(words: array[int]) -> None:
    """Let the engine decode the words. The count of zero items makes running them harmless."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, region_bytes(1))
    plan = words.tobytes()
    communicator = Communicator(
        fd, 0, 1, 0, 0, lambda *_: (plan, False), 0.0, lambda: False, False, [], "{}", str
    )
    os.close(fd)
    nothing = np.empty(0)
    communicator.run(Collective.ALL_REDUCE, 0, 0, nothing, nothing)


def test_truncated_and_prolonged() -> None:
    for length in range(len(GOOD)):
        with pytest.raises(ValueError, match="malformed"):
            teach(GOOD[:length])
    with pytest.raises(ValueError, match="malformed"):
        teach(GOOD + array("i", [0]))


def test_program_of_another_group_is_refused() -> None:
    with pytest.raises(ValueError, match="for rank 1 of 4"):
        teach(GOOD)


SPAN = 9  # where its header says how many chunks a message has at most


def test_messages_that_cannot_fit_are_refused() -> None:
    """Even of the largest items: what does not fit would overflow the ring, or break a frame."""
    changed = array("i", GOOD)
    changed[SPAN] = 1 << 14
    with pytest.raises(ValueError, match="for rank 1 of 4"):  # decoded, and of another group
        teach(changed)
    changed[SPAN] += 1
    with pytest.raises(ValueError, match="has 16385 chunks, and at most 16384 go at once"):
        teach(changed)


@settings(max_examples=2000, deadline=None)
@given(place=st.integers(0, len(GOOD) - 1), word=st.integers(-(2**31), 2**31 - 1))
def test_any_changed_word_is_harmless(place: int, word: int) -> None:
    changed = array("i", GOOD)
    changed[place] = word
    with pytest.raises(ValueError):
        teach(changed)
