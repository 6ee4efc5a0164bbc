"""Messages: tags, any sender, in the background, in batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.formation.subgroups import form_group
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks

SIZES = (0, 1, 3_000, 200_000)


@pytest.mark.parametrize("count", SIZES)
def test_tags_are_received_in_any_order_and_each_in_its_own(count: int) -> None:
    def main(group: ProcessGroup) -> None:
        if group.rank() == 0:
            works = [
                dist.isend(np.full(count, 10 * tag + turn), 1, group, tag)
                for turn in range(3)
                for tag in (1, 2)
            ]
            assert all(work is not None and work.wait() for work in works)
            return
        for tag in (2, 1):
            for turn in range(3):
                got = np.zeros((count, 2), np.int64)[:, 0]
                assert dist.recv(got, 0, group, tag) == 0
                assert (got == 10 * tag + turn).all()

    run_ranks(2, main)


def test_any_number_of_receives_before_the_sends_that_they_wait_for() -> None:
    def main(group: ProcessGroup) -> None:
        other, count = 1 - group.rank(), 1100
        got = np.zeros((count, 1))
        works = [dist.irecv(row, other, group, tag) for tag, row in enumerate(got)]
        works += [dist.isend(np.full(1, float(tag)), other, group, tag) for tag in range(count)]
        assert all(work is not None and work.wait() for work in works)
        assert got[:, 0].tolist() == list(range(count))

    run_ranks(2, main)


def test_but_not_for_ever_more() -> None:
    def main(group: ProcessGroup) -> None:
        array = np.empty(1)
        works = []
        if group.rank() == 0:
            works = [dist.irecv(array, 1, group) for _ in range(1 << 14)]
            with pytest.raises(dist.InvalidArgumentError, match="outstanding; wait for some"):
                dist.irecv(array, 1, group)
        dist.barrier(group)
        if group.rank() == 1:
            dist.send(np.full(1, 7.0), 0, group)
        else:
            assert works[0] is not None
            works[0].wait()
            assert array[0] == 7
            works.append(dist.irecv(array, 1, group))

    run_ranks(2, main)


def test_any_sender_is_named_by_its_global_rank() -> None:
    def main(world: ProcessGroup) -> None:
        group = form_group(world.world, [0, 1, 3])
        if not isinstance(group, ProcessGroup):
            return
        if world.rank() == 3:
            seen = set()
            for _ in range(2):
                got = np.zeros(4)
                sender = dist.recv(got, group=group)
                assert (got == sender).all()
                seen.add(sender)
            got = np.zeros(4)
            work = dist.irecv(got, group=group, tag=5)
            assert work is not None
            assert work.wait()
            assert work.source_rank() == 1 == got[0]
            assert seen == {0, 1}
            return
        dist.send(np.full(4, float(world.rank())), 3, group)
        if world.rank() == 1:
            dist.send(np.ones(4), group_dst=2, group=group, tag=5)

    run_ranks(4, main)


@pytest.mark.parametrize("count", SIZES)
def test_batch_among_all(count: int) -> None:
    """Each rank sends to all others and receives from all, sends first or receives first."""
    ranks = 4

    def main(group: ProcessGroup) -> None:
        me = group.rank()
        others = [rank for rank in range(ranks) if rank != me]
        into = {rank: np.full((count, 2), -1)[:, 1] for rank in others}
        sends = [dist.P2POp(dist.isend, np.full(count, me), rank, group) for rank in others]
        receives = [dist.P2POp(dist.irecv, into[rank], rank, group) for rank in others]
        both = sends + receives if me % 2 else receives + sends
        for work in reversed(dist.batch_isend_irecv(both)):
            assert work.wait()
        assert all((array == rank).all() for rank, array in into.items())

    run_ranks(ranks, main)


def test_wrong_use() -> None:
    def main(group: ProcessGroup) -> None:
        one: Any = np.ones(3)
        with pytest.raises(dist.InvalidArgumentError, match="this rank itself"):
            dist.send(one, 0, group)
        with pytest.raises(dist.InvalidArgumentError, match="isend or irecv"):
            dist.P2POp(dist.send, one, 1)
        with pytest.raises(dist.InvalidArgumentError, match="at least one P2POp"):
            dist.batch_isend_irecv([])

    run_ranks(1, main)


@pytest.mark.parametrize("tag", [2**31, 2**63, 2**64 - 1, -(2**63) - 1, 10**30])
def test_tags_that_do_not_fit_are_refused(tag: int) -> None:
    def main(group: ProcessGroup) -> None:
        other = 1 - group.rank()
        for call in (dist.send, dist.recv, dist.isend, dist.irecv):
            with pytest.raises(dist.InvalidArgumentError, match="tag"):
                call(np.empty(1), other, group, tag=tag)

    run_ranks(2, main)
