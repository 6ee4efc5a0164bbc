"""Messages: tags, any sender, in the background, in batches."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.groups import ProcessGroup
from rallypoint.process_group.subgroups import form_group
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


def test_a_wait_goes_on_while_another_thread_finishes_its_work() -> None:
    """What a wait needs of its work must stay, whoever completes and releases it meanwhile."""
    messages = 60

    def main(group: ProcessGroup) -> None:
        if group.rank() == 1:
            for number in range(messages):
                time.sleep(0.001)  # so that the other waits, and sleeps
                dist.send(np.array([number]), 0, group)
            count = np.empty(1, int)
            dist.recv(count, 0, group)
            for _ in range(int(count[0])):
                dist.send(np.zeros(1), 0, group, tag=1)
            return
        is_over = threading.Event()
        begun: list[Any] = []

        def begin_others() -> None:
            while not is_over.is_set() and len(begun) < 900:
                begun.append(dist.irecv(np.empty(1), 1, group, tag=1))

        thread = threading.Thread(target=begin_others)
        thread.start()
        try:
            for number in range(messages):
                got = np.empty(1, int)
                work = dist.irecv(got, 1, group)
                assert work is not None
                work.wait()
                assert got[0] == number
        finally:
            is_over.set()
            thread.join()
        dist.send(np.array([len(begun)]), 1, group)
        for work in begun:
            work.wait()

    run_ranks(2, main)
