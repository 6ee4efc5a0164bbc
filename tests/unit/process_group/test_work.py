"""Operations in the background: handles, futures, timeouts, and errors that come later."""

from __future__ import annotations

import threading
from datetime import timedelta

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.formation.subgroups import form_group
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.work import Future, ManyWorks
from tests.unit.process_group.ranks import run_ranks


def test_many_at_once_on_two_groups() -> None:
    """Each group keeps its own order; waits may come in any."""
    ranks = 3

    def main(world: ProcessGroup) -> None:
        pair = form_group(world.world, [0, 2])
        me = world.rank()
        works: list[tuple[dist.Work | None, object, object]] = []
        for number in range(20):
            mine = np.full(1 + 997 * number, me + number)
            work = dist.all_reduce(mine, group=world, async_op=True)
            works.append((work, mine, ranks * number + 3))
            wide = np.zeros((4, 6), np.float32)[::2, ::3]  # strided: filled in at the end
            wide[...] = me
            works.append((dist.broadcast(wide, 1, world, async_op=True), wide, 1))
            if isinstance(pair, ProcessGroup):
                both = np.full(5, me)
                work = dist.all_reduce(both, dist.ReduceOp.MAX, pair, async_op=True)
                works.append((work, both, 2))
        for work, array, wanted in reversed(works):
            assert work is not None
            assert work.wait() is True
            assert work.is_completed() and work.is_success() and work.exception() is None
            np.testing.assert_array_equal(array, wanted)
            assert work.result()[0] is array
        assert dist.barrier(world, async_op=True).wait()  # type: ignore[union-attr]

    run_ranks(ranks, main)


def test_future_calls_back_and_chains() -> None:
    def main(group: ProcessGroup) -> None:
        for count in (3, 200_000):
            array = np.ones(count)
            work = dist.all_reduce(array, group=group, async_op=True)
            assert work is not None
            half = work.get_future().then(lambda future: future.value()[0] / 2)
            assert (half.wait() == 1).all() and half.done()
            seen = threading.Event()
            work.get_future().add_done_callback(lambda _: seen.set())  # noqa: B023
            assert seen.wait(200)
            failing = half.then(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                failing.wait()
        several = dist.all_reduce_coalesced([np.ones(2), np.ones(3)], group=group, async_op=True)
        assert several is not None
        assert [list(a) for a in several.get_future().wait()] == [[2, 2], [2, 2, 2]]
        assert several.is_success() and several.wait() and len(several.result()) == 2
        assert dist.all_reduce_coalesced([], group=group) is None

    run_ranks(2, main)


def test_futures_of_many_small_calls() -> None:
    """The moment in which an operation ends and is released is short: meet it often."""

    def main(group: ProcessGroup) -> None:
        for _ in range(1000):
            work = dist.all_reduce(np.ones(3), group=group, async_op=True)
            assert work is not None
            (result,) = work.get_future().wait()
            assert result.tolist() == [2, 2, 2]
            assert work.is_completed() and work.exception() is None

    run_ranks(2, main)


def test_waiting_may_time_out_and_go_on() -> None:
    gate = threading.Event()

    def main(group: ProcessGroup) -> None:
        array = np.ones(3)
        if group.rank() == 1:
            gate.wait(200)
            dist.all_reduce(array, group=group)
            return
        work = dist.all_reduce(array, group=group, async_op=True)
        assert work is not None
        with pytest.raises(dist.CollectiveTimeoutError, match="still running"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        gate.set()
        assert work.wait()
        assert (array == 2).all()

    run_ranks(2, main)


def test_timeout_of_one_call() -> None:
    gate = threading.Event()

    def main(group: ProcessGroup) -> None:
        if group.rank() == 1:
            gate.wait(200)
            return
        try:
            with pytest.raises(dist.CollectiveTimeoutError, match="rank 1"):
                dist.all_reduce(np.ones(3), group=group, timeout=timedelta(seconds=0.1))
        finally:
            gate.set()

    run_ranks(2, main)


def test_error_names_the_line_that_called() -> None:
    def main(group: ProcessGroup) -> None:
        array = np.ones(3 + group.rank())
        work = dist.all_reduce(array, group=group, async_op=True)  # this line
        assert work is not None
        with pytest.raises(
            dist.MismatchError, match=r"float64\[4\], SUM\) at .*test_work.py:"
        ) as e:
            work.wait()
        sites = {call.rpartition(":")[2] for call in e.value.calls.values()}
        assert len(sites) == 1
        assert isinstance(work.exception(), dist.MismatchError) and not work.is_success()
        with pytest.raises(dist.MismatchError):
            work.get_future().wait()

    run_ranks(2, main)


def test_error_is_known_after_the_group_is_left() -> None:
    def main(group: ProcessGroup) -> None:
        if group.rank() == 1:
            group.destroy()
            return
        work = dist.all_reduce(np.ones(3), group=group, async_op=True)
        assert work is not None
        with pytest.raises(dist.PeerLostError, match="rank 1"):
            work.wait()
        group.destroy()
        error = work.exception()
        assert isinstance(error, dist.PeerLostError) and error.rank == 1, error

    run_ranks(2, main)


def test_a_callback_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is told as that of a thread is."""
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: told.append(failed.exc_type))
    future, seen = Future(), []
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda _: seen.append("second"))
    following = future.then(lambda _: "followed")
    future._settle(None, None)
    future.add_done_callback(lambda _: 1 / 0)  # there is nothing to wait for any more
    assert following.wait() == "followed"
    assert (seen, told) == (["second"], [ZeroDivisionError, ZeroDivisionError])


def test_a_barrier_waited_for_later_is_the_same_call() -> None:
    def main(group: ProcessGroup) -> None:
        for waits in (0, 1):
            work = dist.barrier(group, async_op=group.rank() == waits)
            if work is not None:
                work.wait()

    run_ranks(2, main)


def test_several_works_of_none_are_over() -> None:
    """As of a coalescing block in which nothing was called."""
    none = ManyWorks([])
    assert none.wait()
    assert none.is_completed()
    assert none.is_success()
    assert (none.exception(), none.result(), none.source_rank()) == (None, [], -1)
    told: list[object] = []
    none.add_done_callback(told.append)
    assert told == [none]
    assert none.get_future().wait() == []
