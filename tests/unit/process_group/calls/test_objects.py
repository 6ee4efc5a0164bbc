"""Collectives on Python objects of different sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rallypoint as dist
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks


def thing(rank: int) -> Any:
    """A large one, a small one, ..."""
    return {"rank": rank, "data": list(range(50_000 * (rank % 2))), "none": None}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_objects_arrive(ranks: int) -> None:
    def main(group: ProcessGroup) -> None:
        me = group.rank()
        things = [thing(rank) for rank in range(ranks)]
        got: list[Any] = [None] * ranks
        dist.all_gather_object(got, thing(me), group)
        assert got == things
        for root in range(ranks):
            is_root = me == root
            got = [None] * ranks
            dist.gather_object(thing(me), got if is_root else None, root, group)
            assert got == (things if is_root else [None] * ranks)
            got = [thing(0), root, "end"] if is_root else [None] * 3
            dist.broadcast_object_list(got, root, group)
            assert got == [thing(0), root, "end"]
            one = [None]
            dist.scatter_object_list(one, things if is_root else None, root, group)
            assert one == [things[me]]
        if ranks > 1 and me < 2:
            got = [thing(1), "x", ()]
            if me == 0:
                dist.send_object_list(got, 1, group)
            else:
                got = [None] * 3
                assert dist.recv_object_list(got, 0, group) == 0
                assert got == [thing(1), "x", ()]

    run_ranks(ranks, main)


def test_lists_of_the_wrong_length() -> None:
    def main(group: ProcessGroup) -> None:
        calls: list[Callable[[], None]] = [
            lambda: dist.all_gather_object([], 1, group),
            lambda: dist.gather_object(1, [None, None], group=group),
            lambda: dist.gather_object(1, None, group=group),
            lambda: dist.scatter_object_list([], [1], group=group),
            lambda: dist.scatter_object_list([None], [1, 2], group=group),
        ]
        for call in calls:
            with pytest.raises(dist.InvalidArgumentError):
                call()

    run_ranks(1, main)
