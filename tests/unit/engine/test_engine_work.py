"""Operations in the background: their order, their ends, blocks of any length."""

from __future__ import annotations

import random
import signal
import threading
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from rallypoint.base.errors import CollectiveTimeoutError, MismatchError, PeerError, PeerLostError
from rallypoint.engine.communicator import BAD_BUFFER, Communicator, ReduceOp
from rallypoint.engine.engine_work import EngineWork
from rallypoint.schedule.program import Collective
from tests.unit.engine.ranks import begin, communicators_of, move, post, run_ranks, sleeps, struck


def all_reduce(communicator: Communicator, values: Any, **options: Any) -> EngineWork:
    return begin(communicator, Collective.ALL_REDUCE, 0, 0, values, values, **options)


def test_more_under_way_than_are_kept() -> None:
    """A rank that has begun 1,024 calls waits in the next one for the first."""

    def main(communicator: Communicator) -> None:
        arrays = [np.full(1, communicator.rank + i) for i in range(1030)]
        if communicator.rank == 1:
            has_begun.wait(60)
        works = []
        for array in arrays:
            works.append(all_reduce(communicator, array))
            if len(works) == 1024:
                has_begun.set()
        for work in works:
            work.wait()
        assert [int(array[0]) for array in arrays] == [2 * i + 1 for i in range(1030)]

    has_begun = threading.Event()
    run_ranks(2, main)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_many_under_way_waited_for_in_any_order(ranks: int, seed: int) -> None:
    def main(communicator: Communicator) -> None:
        sizes = random.Random(seed)  # alike on all ranks
        own = random.Random(seed + communicator.rank)
        for _ in range(20):
            counts = [sizes.choice([0, 1, 100, 10_000, 200_000]) for _ in range(12)]
            arrays = [np.full(count, communicator.rank + i) for i, count in enumerate(counts)]
            works = [all_reduce(communicator, array) for array in arrays]
            sync = np.ones(5)
            if sizes.random() < 0.5:  # comes after those under way
                assert communicator.run(Collective.ALL_REDUCE, 0, 0, sync, sync) == 0
                assert (sync == ranks).all()
            own.shuffle(works)
            for work in works[: own.randrange(len(works))]:
                work.wait()
            while not all(work.is_completed() for work in works):
                pass
            for i, array in enumerate(arrays):
                assert (array == ranks * (ranks - 1) // 2 + i * ranks).all()

    run_ranks(ranks, main)


def test_completes_without_anybody_waiting() -> None:
    """Small ones are not worth waking a thread for, but get done all the same."""

    def main(communicator: Communicator) -> None:
        for count in (1, 100_000):
            values = [np.ones(count) for _ in range(5)]
            done = threading.Event()
            works = [all_reduce(communicator, array) for array in values]

            def back(_: EngineWork, done: threading.Event = done) -> None:
                done.set()

            works[-1].add_done_callback(back)
            assert done.wait(200)
            assert all((array == 2).all() for array in values)

    run_ranks(2, main)


def test_more_than_are_allowed_to_be_under_way() -> None:
    """Who begins them waits for the first one, which another rank is late for."""
    begun: list[EngineWork] = []
    threads: list[int] = []

    def main(communicator: Communicator) -> None:
        values = [np.ones(1) for _ in range(3000)]
        if communicator.rank == 0:
            threads.append(threading.get_native_id())
        else:
            while not (len(begun) == 1024 and sleeps(threads[0])):
                pass
        works = begun if communicator.rank == 0 else []
        for array in values:
            works.append(all_reduce(communicator, array))
        works[-1].wait()
        assert all((array == 2).all() for array in values)

    run_ranks(2, main)


def test_arrays_live_until_the_end_and_no_longer() -> None:
    class Array(np.ndarray[Any, Any]):
        """Can be referred to weakly."""

    is_seen = threading.Event()

    def main(communicator: Communicator) -> None:
        values = np.ones(200_000).view(Array)
        gone = weakref.ref(values)
        if communicator.rank == 0:
            work = all_reduce(communicator, values)
            del values
            assert gone() is not None
            is_seen.set()
            sync = np.zeros(1)
            communicator.run(Collective.BROADCAST, 0, 1, sync, sync)
            work.wait()
            assert gone() is None
        else:
            sync = np.zeros(1)
            is_seen.wait(200)
            all_reduce(communicator, values)
            communicator.run(Collective.BROADCAST, 0, 1, sync, sync)

    run_ranks(2, main)


def test_callbacks_and_what_finishes_run_once() -> None:
    def main(communicator: Communicator) -> None:
        for late in (False, True):
            calls: list[str] = []
            values = np.ones(3)
            done = threading.Event()

            def back(work: EngineWork, calls: list[str] = calls, done: Any = done) -> None:
                calls.append("callback")
                assert work.exception() is None
                # A callback may wait for another operation.
                again = np.ones(3)
                all_reduce(communicator, again).wait()
                assert (again == 2).all()
                done.set()

            work = all_reduce(communicator, values, finish=lambda c=calls: c.append("finish"))
            if late:
                work.wait()
            work.add_done_callback(back)
            assert done.wait(200)
            work.wait()
            assert calls == ["finish", "callback"]

    run_ranks(2, main)


def test_waiting_for_a_time_leaves_the_operation_alone() -> None:
    def main(communicator: Communicator) -> None:
        values = np.ones(3)
        if communicator.rank == 0:
            work = all_reduce(communicator, values)
            with pytest.raises(CollectiveTimeoutError, match="still running"):
                work.wait(timedelta(seconds=0.01))
            assert move(communicator, 0, 1, 0, values[:0]) == 0
            work.wait()
        else:
            assert move(communicator, 0, 1, 0, values[:0]) == 0
            all_reduce(communicator, values).wait()
        assert (values == 2).all()

    run_ranks(2, main)


@pytest.mark.parametrize("way", ["wait", "callback"])
def test_every_operation_under_way_fails_with_the_group(way: str) -> None:
    def main(communicator: Communicator) -> None:
        if communicator.rank == 1:
            communicator.leave()
            return
        works = [all_reduce(communicator, np.ones(3)) for _ in range(3)]
        for work in works:
            if way == "wait":
                with pytest.raises(PeerLostError, match="rank 1"):
                    work.wait()
            else:
                errors: list[PeerError | None] = []
                told = threading.Event()

                def back(
                    work: EngineWork, errors: Any = errors, told: threading.Event = told
                ) -> None:
                    errors.append(work.exception())
                    told.set()

                work.add_done_callback(back)
                assert told.wait(200)
                assert isinstance(errors[0], PeerLostError)
        assert all(work.is_completed() for work in works)

    run_ranks(2, main)


def test_timeout_of_one_call() -> None:
    def main(communicator: Communicator) -> None:
        if communicator.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"0\.1 s for rank 1"):
                all_reduce(communicator, np.ones(3), timeout_s=0.1).wait()

    run_ranks(2, main)


SIDES = {
    Collective.ALL_GATHER: (1, 0),
    Collective.ALL_TO_ALL: (0, 0),
    Collective.REDUCE_SCATTER: (0, 1),
    Collective.GATHER: (1, 0),
    Collective.SCATTER: (0, 1),
}


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("collective", SIDES, ids=lambda c: c.name.lower())
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_blocks_of_any_length_as_lists(collective: Collective, ranks: int) -> None:
    """table[r][s] is what rank r has for rank s; also no items, and several pieces."""
    root = ranks - 1

    def main(communicator: Communicator) -> None:
        rank = communicator.rank
        rng = np.random.default_rng(5)
        for most in (0, 5, 3000, 200_000):
            by_rank = rng.integers(0, most, ranks, endpoint=True)
            table = rng.integers(0, most, (ranks, ranks), endpoint=True)
            if collective in (Collective.ALL_GATHER, Collective.GATHER):
                table = np.repeat(by_rank[:, None], ranks, axis=1)
            elif collective in (Collective.REDUCE_SCATTER, Collective.SCATTER):
                table = np.repeat(by_rank[None], ranks, axis=0)
            data = [[rng.integers(0, 99, table[r, s]) for s in range(ranks)] for r in range(ranks)]
            single_in, single_out = SIDES[collective]
            source: Any = [data[rank][s].copy() for s in range(ranks)]
            wanted: Any = [data[r][rank] for r in range(ranks)]
            if single_in:
                source = np.full(by_rank[rank], rank)
                wanted = [np.full(by_rank[r], r) for r in range(ranks)]
            if collective is Collective.REDUCE_SCATTER:
                wanted = [sum(wanted)]
            elif collective is Collective.SCATTER:
                wanted = [data[root][rank]]
            target: Any = [np.full_like(block, -1) for block in wanted]
            if collective is Collective.SCATTER and rank != root:
                source = None
            if collective is Collective.GATHER and rank != root:
                target = wanted = []
            work = begin(
                communicator,
                collective,
                0,
                root if collective.has_root else 0,
                source,
                target[0] if single_out else target or None,
                uneven=True,
            )
            work.wait()
            for got, block in zip(target, wanted, strict=True):
                np.testing.assert_array_equal(got, block)

    run_ranks(ranks, main)


def test_lists_of_equal_blocks() -> None:
    """Need no agreement, and may meet a single array on another rank."""

    def main(communicator: Communicator) -> None:
        rank = communicator.rank
        for count in (1, 5000, 200_000):
            mine = np.full(count, rank)
            parts = [np.empty(count, int) for _ in range(3)]
            whole = np.empty((3, count), int)
            target: Any = whole if rank == 1 else parts
            begin(communicator, Collective.ALL_GATHER, 0, 0, mine, target).wait()
            for peer in range(3):
                assert (target[peer] == peer).all()

    run_ranks(3, main)


def test_lengths_that_do_not_fit_are_a_mismatch() -> None:
    def main(communicator: Communicator) -> None:
        rank = communicator.rank
        source = [np.ones(3 + rank), np.ones(3)]
        target = [np.empty(3), np.empty(3)]
        work = begin(communicator, Collective.ALL_TO_ALL, 0, 0, source, target, uneven=True)
        with pytest.raises(MismatchError, match="32 bytes for rank 0, which expects 24"):
            work.wait()
            all_reduce(communicator, np.ones(1)).wait()  # who got what it expects learns it here

    run_ranks(2, main)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (np.ones(3), [np.ones(3)]),
        (np.ones(3), [np.ones(3), np.ones(3, np.float32)]),
        (np.ones(3), [np.ones(3), np.ones(6)[::2]]),
        (np.ones(3), np.ones(5)),
        (np.ones(3), None),
        ([7], np.ones(6)),
    ],
)
def test_arrays_that_do_not_fit_change_nothing(source: Any, target: Any) -> None:
    def main(communicator: Communicator) -> None:
        arguments = (Collective.ALL_GATHER, ReduceOp.SUM, 0, source, target)
        assert communicator.submit(*arguments) == BAD_BUFFER

    run_ranks(2, main)


def test_a_work_may_be_released_while_someone_waits_for_it() -> None:
    """As another thread may do, or, surely in the middle of the wait, a signal handler."""
    got = np.zeros(1)

    def complete_and_release(*_: object) -> None:
        assert other.send(0, 0, np.ones(1)) == 0
        for _each in range(2):  # the first takes what came; the second lets go of what is done
            post(own, False, 1, 1, np.zeros(1))

    with communicators_of(2, is_alone=False) as (own, other):
        work = post(own, False, 1, 0, got)
        with struck(complete_and_release):
            work.wait()
    assert got[0] == 1


def test_an_error_of_a_callback_of_what_is_over_is_reported_not_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))

    def main(communicator: Communicator) -> None:
        work = all_reduce(communicator, np.ones(1))
        work.wait()

        def fail(_: EngineWork) -> None:
            raise ValueError("mine")

        work.add_done_callback(fail)

    run_ranks(2, main)
    assert [str(each) for each in reported] == ["mine", "mine"]


def test_a_signal_handler_waits_for_a_work_that_is_being_finished() -> None:
    """It finishes it itself, as the thread that it has interrupted cannot go on before."""
    seen = list[str]()

    def main(communicator: Communicator) -> None:
        def handle(*_: object) -> None:
            seen.append("in the handler")
            work.wait()
            work.add_done_callback(lambda _: seen.append("told"))

        def finish() -> None:
            if not seen:
                signal.raise_signal(signal.SIGUSR1)
            seen.append("finished")

        values = np.ones(3)
        native = all_reduce(communicator, values)._native
        work = EngineWork(native, communicator, "all_reduce", finish)
        before = signal.signal(signal.SIGUSR1, handle)
        try:
            work.wait()
        finally:
            signal.signal(signal.SIGUSR1, before)

    with communicators_of(1) as (communicator,):
        main(communicator)
    assert seen == ["in the handler", "finished", "told", "finished"]
