"""reform_world, called by ranks that are threads; deaths are in tests/system/test_reforming.py."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.formation.connecting import GroupRequest
from rallypoint.process_group.formation.joining import reform_world
from rallypoint.process_group.formation.opening import form_world
from rallypoint.process_group.formation.subgroups import form_group
from rallypoint.process_group.groups.default import set_default
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.planning import AlgorithmOptions
from rallypoint.store.init_method import JoinedStore
from rallypoint.store.prefix import PrefixStore
from tests.unit.process_group import ranks as of_ranks
from tests.unit.process_group.ranks import run_ranks

WAIT = timedelta(seconds=200)


def again(group: ProcessGroup, rank: int, size: int, prefix: str, **named: Any) -> None:
    place = JoinedStore(store=group.world.store, rank=rank, world_size=size)
    reform_world(group, place, prefix, **{"timeout": WAIT, **named})


def summed(group: ProcessGroup, value: float) -> float:
    mine = np.array([value])
    dist.all_reduce(mine, group=group)
    return float(mine[0])


def test_members_leave_and_change_places() -> None:
    def main(group: ProcessGroup) -> list[object]:
        me, found = group.rank(), list[object]()
        for prefix, members in (("a", [0, 1, 2]), ("b", [2, 0]), ("c", [0])):
            if me not in members:
                break
            again(group, members.index(me), len(members), prefix)
            assert (group.rank(), group.size()) == (members.index(me), len(members))
            assert group.is_world and not group.is_destroyed
            assert list(group.ranks) == list(range(len(members)))
            assert dist.get_global_rank(group, 0) == 0
            assert [group.group_rank(rank, "rank") for rank in group.ranks] == list(group.ranks)
            found.append(summed(group, 10**me))
        return found

    assert run_ranks(4, main) == [[111, 101, 1], [111], [111, 101], []]


def test_a_newcomer_joins() -> None:
    def main(group: ProcessGroup) -> float:
        if group.rank() == 2:
            store = group.world.store
            group.destroy()
            request = GroupRequest(
                store=store,
                prefix="grown",
                rank=2,
                members=range(3),
                timeout=WAIT,
                options=AlgorithmOptions(),
                backend=of_ranks.chosen_backend,
            )
            group = form_world(request)
            return summed(group, 4)
        again(group, group.rank(), 2, "small")
        assert summed(group, 1 + group.rank()) == 3
        again(group, group.rank(), 3, "grown")
        return summed(group, 1 + group.rank())

    assert run_ranks(3, main) == [7, 7, 7]


def test_calls_under_way_end_once_with_an_error() -> None:
    def main(group: ProcessGroup) -> None:
        if group.rank() == 2:
            return  # the others wait for it, until they give up
        ended = list[str]()
        buffers = [np.ones(2) for _ in range(5)]
        works = [dist.all_reduce(each, group=group, async_op=True) for each in buffers[:3]]
        works.append(dist.irecv(buffers[3], 2, group))
        works.append(dist.irecv(buffers[4], None, group, tag=7))
        for work in works:
            assert work is not None
            work.add_done_callback(lambda each: ended.append(each.operation))
        again(group, group.rank(), 2, "next")
        for work in works:
            assert work is not None and work.is_completed() and not work.is_success()
            with pytest.raises(dist.PeerError):
                work.wait()
            assert isinstance(work.exception(), dist.PeerError)
            assert work.source_rank() in (-1, 2)
        before = [each.copy() for each in buffers]
        assert summed(group, 1) == 2
        assert all((one == two).all() for one, two in zip(before, buffers, strict=True))
        while len(ended) < len(works):
            threading.Event().wait(0.01)
        assert sorted(ended) == ["all_reduce"] * 3 + ["irecv"] * 2

    run_ranks(3, main)


def test_a_call_in_another_thread_ends() -> None:
    def main(group: ProcessGroup) -> None:
        if group.rank() == 2:
            return
        found = list[BaseException]()
        begun = group.communicator.begun

        def call() -> None:
            try:
                summed(group, 1)
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        while group.communicator.begun == begun:
            threading.Event().wait(0.001)
        again(group, group.rank(), 2, "next")
        thread.join()
        assert isinstance(found[0], dist.PeerError)
        assert summed(group, 1) == 2

    run_ranks(3, main)


def test_what_a_peer_has_completed_this_rank_completes() -> None:
    """A change of members without a failure spoils no call of the old round."""

    def main(group: ProcessGroup) -> list[float]:
        found = []
        for place in range(20):
            found.append(summed(group, 1))
            again(group, group.rank(), 3, f"round {place}")
        return found

    assert run_ranks(3, main) == [[3.0] * 20] * 3


def test_subgroups_are_left_for_good() -> None:
    def main(group: ProcessGroup) -> None:
        part = form_group(group.world, [0, 1])
        assert isinstance(part, ProcessGroup)
        left: ProcessGroup = part
        again(group, group.rank(), 2, "next")
        calls: list[Callable[[], object]] = [
            lambda: dist.barrier(group=left),
            lambda: dist.all_reduce(np.ones(1), group=left, async_op=True),
            lambda: dist.send(np.ones(1), 1 - group.rank(), left),
            lambda: dist.shrink_group([1 - left.rank()], left),
        ]
        for call in calls:
            with pytest.raises(dist.RevokedError, match="make it again with new_group"):
                call()
        dist.destroy_process_group(part)
        part = form_group(group.world, [0, 1])
        assert isinstance(part, ProcessGroup) and summed(part, 1) == 2
        assert group.world.subgroups == [part]

    run_ranks(2, main)


def test_after_a_failure_it_may_be_tried_again() -> None:
    def main(group: ProcessGroup) -> None:
        if group.rank() == 1:
            group.world.destroy()
            return
        for prefix in ("one", "two"):
            with pytest.raises(dist.StoreTimeoutError):
                again(group, 0, 2, prefix, timeout=timedelta(seconds=0.05))
            assert group.is_revoked and group.is_world
            with pytest.raises(dist.RevokedError, match="formed again"):
                dist.barrier(group=group)
            with pytest.raises(dist.RevokedError):
                group.set_timeout(WAIT)
            with pytest.raises(dist.RevokedError):
                dist.shrink_group([1], group)
        again(group, 0, 1, "three")
        assert summed(group, 5) == 5 and not group.is_revoked
        with pytest.raises(dist.StoreTimeoutError):
            again(group, 0, 2, "four", timeout=timedelta(seconds=0.05))
        dist.destroy_process_group(group)
        calls: list[Callable[[], object]] = [
            lambda: dist.barrier(group=group),
            lambda: again(group, 0, 1, "five"),
        ]
        for call in calls:
            with pytest.raises(dist.NotInitializedError, match="was destroyed"):
                call()

    run_ranks(2, main)


def test_only_a_default_group() -> None:
    def main(group: ProcessGroup) -> None:
        part = form_group(group.world)
        assert isinstance(part, ProcessGroup)
        with pytest.raises(dist.InvalidArgumentError, match="only a default group"):
            again(part, 0, 1, "next")

    run_ranks(1, main)


def test_options_time_outs_and_counts_follow() -> None:
    def main(group: ProcessGroup) -> None:
        group.set_timeout(timedelta(seconds=250))
        summed(group, 1)
        dist.all_reduce(np.ones(1), group=group, algorithm="ring")
        again(group, group.rank(), 2, "next")
        assert group.timeout == timedelta(seconds=250)
        assert group.algorithms.options.override == "recursive_doubling"
        assert group.communicator.begun == 0
        dist.all_reduce(np.ones(1), group=group, algorithm="ring")
        dist.monitored_barrier(group)
        with pytest.raises(dist.MismatchError) as raised:
            dist.all_reduce(np.ones(1), group=group, algorithm="ring" if group.rank() else None)
        assert raised.value.calls.keys() == {0, 1}
        again(group, group.rank(), 2, "after")
        assert summed(group, 1) == 2

    run_ranks(2, main, override="recursive_doubling")


def test_a_coalescing_manager_that_was_open() -> None:
    def main(group: ProcessGroup) -> None:
        with pytest.raises(dist.PeerError), dist._coalescing_manager(group):
            if group.rank() == 0:
                dist.all_reduce(np.ones(1), group=group)
            again(group, group.rank(), 2, "next")
            if group.rank():
                raise dist.PeerError("rank 0 has its own")
        assert group.deferred is None
        assert summed(group, 1) == 2

    run_ranks(2, main)


class Closed:
    """How often a store was closed."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def test_the_store_is_closed_once() -> None:
    def main(group: ProcessGroup) -> None:
        first, second, third = Closed(), Closed(), Closed()
        group.world.on_destroy = first
        again(group, 0, 1, "same store")
        assert first.times == 0
        other = PrefixStore("elsewhere", group.world.store)
        reform_world(
            group,
            JoinedStore(store=other, rank=0, world_size=1),
            "other store",
            timeout=WAIT,
            on_destroy=second,
        )
        assert (first.times, second.times) == (1, 0)
        again(group, 0, 1, "same", on_destroy=third)
        dist.destroy_process_group(group)
        assert (first.times, second.times, third.times) == (1, 0, 1)

    run_ranks(1, main)


def test_it_stays_the_default_group() -> None:
    def main(group: ProcessGroup) -> None:
        set_default(group)
        try:
            again(group, 0, 1, "next")
            assert dist.group.WORLD is group
            assert dist.new_group() is not None
        finally:
            dist.destroy_process_group()

    run_ranks(1, main)


def held() -> tuple[int, int, int, int]:
    """Descriptors, mappings, threads and pages in memory of this process."""
    here = Path("/proc/self")
    descriptors = len(list((here / "fd").iterdir()))
    mappings = len((here / "maps").read_text().splitlines())
    pages = int((here / "statm").read_text().split()[1])
    return descriptors, mappings, len(list((here / "task").iterdir())), pages


def rounds() -> Iterator[str]:
    return (f"round {place}" for place in count())


def test_a_hundred_rounds_leave_nothing() -> None:
    def main(group: ProcessGroup) -> list[tuple[int, int, int, int]]:
        names, seen = rounds(), []
        for _ in range(3):
            for _ in range(50):
                again(group, group.rank(), 2, next(names))
                work = dist.all_reduce(np.ones(1000), group=group, async_op=True)
                assert work is not None and work.wait() and summed(group, 1) == 2
            again(group, group.rank(), 2, next(names))
            gc.collect()
            dist.barrier(group=group)
            if group.rank() == 0:
                seen.append(held())
            dist.barrier(group=group)
        return seen

    (warm, _, last), _ = run_ranks(2, main)
    # Threads and the allocator keep a little for later.
    assert all(after <= before + 3 for before, after in zip(warm[:3], last[:3], strict=True))
    assert (last[3] - warm[3]) * os.sysconf("SC_PAGESIZE") <= 2 << 20
