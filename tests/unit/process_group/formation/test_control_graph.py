"""The graph over which deaths are told, where not each rank is connected with each."""

from __future__ import annotations

import random

import pytest

from rallypoint.process_group.formation.mesh import neighbours


def steps_to_all(ranks: int, start: int, gone: frozenset[int]) -> int | None:
    """After how many steps every rank that is not gone has heard; None if some never do."""
    heard, newest, steps = {start}, {start}, 0
    while newest:
        newest = {n for each in newest for n in neighbours(each, ranks)} - heard - gone
        heard |= newest
        steps += bool(newest)
    return steps if len(heard) == ranks - len(gone) else None


@pytest.mark.parametrize("ranks", [2, 3, 5, 64, 65, 100, 256])
def test_neighbours_are_mutual_and_few(ranks: int) -> None:
    for rank in range(ranks):
        known = neighbours(rank, ranks)
        assert rank not in known
        assert known == sorted(set(known))
        assert all(rank in neighbours(other, ranks) for other in known)
        assert len(known) <= 2 * (ranks - 1).bit_length()


@pytest.mark.parametrize(("ranks", "most", "steps"), [(256, 15, 4), (1024, 19, 5), (65, 14, 3)])
def test_everybody_hears_after_few_steps(ranks: int, most: int, steps: int) -> None:
    """The numbers that the documentation gives."""
    assert max(len(neighbours(rank, ranks)) for rank in range(ranks)) <= most
    assert steps_to_all(ranks, 0, frozenset()) == steps


@pytest.mark.parametrize("ranks", [65, 256])
def test_the_deaths_of_some_keep_nobody_from_hearing(ranks: int, seed: int) -> None:
    """A whole host of eight neighbours in rank, any six others, and both."""
    rng = random.Random(seed)
    for _ in range(50):
        first = rng.randrange(ranks)
        host = frozenset((first + each) % ranks for each in range(8))
        others = frozenset(rng.sample(range(ranks), 6))
        for gone in (host, others, host | others):
            start = rng.choice([rank for rank in range(ranks) if rank not in gone])
            assert steps_to_all(ranks, start, gone) is not None
