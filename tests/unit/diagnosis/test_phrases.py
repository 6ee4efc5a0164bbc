"""Durations, lists of ranks and long sentences, as people read them."""

from __future__ import annotations

import pytest

from rallypoint.diagnosis.answer_text import cut, joined
from rallypoint.diagnosis.explanation import MOST_CHARACTERS
from rallypoint.diagnosis.phrases import does, seconds, shortened, some_ranks


@pytest.mark.parametrize(
    ("duration_s", "told"),
    [(0.04, "40 ms"), (12, "12.0 s"), (340, "340 s"), (599, "599 s"), (1500, "25 min")],
)
def test_durations(duration_s: float, told: str) -> None:
    assert seconds(duration_s) == told


def test_ranks() -> None:
    assert some_ranks([2, 0, 1]) == "ranks 0-2"
    assert some_ranks(range(0, 200, 2)) == "100 ranks (0, 2, 4, ...)"
    assert [does("is in sleep", count) for count in (1, 2)] == ["is in sleep", "are in sleep"]


@pytest.mark.parametrize(
    ("text", "most", "told"),
    [
        ("one two three", 13, "one two three"),
        ("one two three", 12, "one two ..."),
        ("one two three", 8, "one two ..."),
        ("indivisible", 5, "indiv ..."),
    ],
)
def test_words_are_left_out_whole(text: str, most: int, told: str) -> None:
    assert shortened(text, most) == told


def test_a_sentence_is_cut_before_those_who_wait() -> None:
    waiting = "ranks 1-3 wait for it"
    assert cut("rank 0 sleeps", waiting) == "rank 0 sleeps; ranks 1-3 wait for it."
    long = cut("word " * 200, waiting)
    assert long.endswith(" word ...; ranks 1-3 wait for it.")
    assert len(long) <= MOST_CHARACTERS
    # A list that leaves no room is left out instead.
    assert cut("rank 0 sleeps", "w" * MOST_CHARACTERS) == "rank 0 sleeps."
    alone = cut("word " * 200)
    assert alone.endswith("word ....")
    assert len(alone) <= MOST_CHARACTERS


def test_parts_of_a_sentence() -> None:
    assert joined(["a", "", "b"]) == "a; b."
    assert joined(["a", "b" * MOST_CHARACTERS]) == "a."
