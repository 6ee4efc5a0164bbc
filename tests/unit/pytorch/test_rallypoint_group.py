"""What a PyTorch process group is beside its collectives: time-outs, parts of it, its end."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from rallypoint.base.errors import (  # noqa: E402
    CollectiveTimeoutError,
    MismatchError,
    NotInitializedError,
    PeerError,
    PeerLostError,
)
from rallypoint.process_group.calls import collectives  # noqa: E402
from tests.unit.process_group.ranks import await_at_barrier  # noqa: E402
from tests.unit.pytorch.ranks import run_ranks  # noqa: E402

c10d: Any = torch._C._distributed_c10d
pytestmark = pytest.mark.needs_torch


def test_monitored_barrier_names_all_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of torch's, which asks for gloo by name; and the group is as good as before."""
    monkeypatch.setattr(collectives, "_GRACE", timedelta(seconds=200))
    told = threading.Barrier(2)

    def main(group: Any) -> None:
        group.monitored_barrier()
        if group.rank() in (0, 2):
            if group.rank() == 0:
                await_at_barrier(group.engine_group, 2, 1)
            with pytest.raises(CollectiveTimeoutError, match=r"1, 3"):
                group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)
            told.wait()
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        assert float(tensor) == 4

    run_ranks(4, main)


def test_split_group_is_a_group_of_its_own() -> None:
    def main(group: Any) -> None:
        for turn in range(2):  # the same ranks may split again
            evens = group.split_group([2, 0])
            assert (evens is None) == (group.rank() == 1)
            if evens is not None:
                assert evens.rank() == (0 if group.rank() == 2 else 1), turn
                tensor = torch.tensor([float(group.rank())])
                evens.broadcast([tensor], c10d.BroadcastOptions()).wait()
                assert float(tensor) == 2
                evens.shutdown()
        group.barrier().wait()

    run_ranks(3, main)


def test_timeouts_of_a_group_and_of_a_call() -> None:
    over = threading.Event()

    def main(group: Any) -> None:
        if group.rank() == 1:
            over.wait(200)
            return
        try:
            group.set_timeout(timedelta(seconds=0.1))
            with pytest.raises(CollectiveTimeoutError, match=r"after 0.1 s: 1"):
                group.monitored_barrier()
            with pytest.raises(CollectiveTimeoutError, match="rank 1"):
                group.allreduce([torch.ones(2)]).wait()
        finally:
            over.set()

    run_ranks(2, main)


def test_abort_ends_the_waits_of_all() -> None:
    waits = threading.Event()

    def main(group: Any) -> None:
        if group.rank() == 0:
            options = c10d.AllreduceOptions()
            options.asyncOp = True
            work = group.allreduce([torch.ones(2)], options)
            future = work.get_future()
            waits.set()
            with pytest.raises(PeerError):
                work.wait()
            with pytest.raises(Exception, match="rank 1"):
                future.wait()
            assert work.is_completed() and not work.is_success()
            assert isinstance(work.exception(), PeerError)
        else:
            waits.wait(200)
            group.abort()
            with pytest.raises(NotInitializedError):
                group.allreduce([torch.ones(2)])
            group.abort()  # once more does nothing

    run_ranks(2, main)


def test_a_rank_that_left_is_named() -> None:
    def main(group: Any) -> None:
        if group.rank() == 1:
            group.shutdown()
            return
        with pytest.raises(PeerLostError, match="rank 1") as e:
            group.allreduce([torch.ones(2)]).wait()
        assert e.value.rank == 1
        assert isinstance(e.value, RuntimeError)

    run_ranks(2, main)


def test_ranks_that_disagree_are_told_what_each_called() -> None:
    def main(group: Any) -> None:
        with pytest.raises(MismatchError, match=r"float32\[3\].*float32\[2\]"):
            group.allreduce([torch.ones(3 - group.rank())]).wait()

    run_ranks(2, main)


def test_works_wait_only_as_long_as_asked() -> None:
    gate = threading.Event()

    def main(group: Any) -> None:
        value = torch.ones(1)
        if group.rank() == 1:
            gate.wait(200)
            group.send([value], 0, 3).wait()
            return
        work = group.recv([value.zero_()], 1, 3)
        with pytest.raises(CollectiveTimeoutError):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed() and not work.is_success() and work.exception() is None
        gate.set()
        assert work.wait() and work.result()[0] is value and float(value) == 1
        assert work.source_rank() == 1

    run_ranks(2, main)


def test_a_work_asked_by_many_threads_at_once() -> None:
    """All get the one future, and are told."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def main(group: Any) -> None:
        value = torch.zeros(1)
        for turn in range(200):
            if group.rank() == 1:
                group.barrier().wait()
                group.send([value], 0, turn).wait()
                continue
            work = group.recv([value], 1, turn)
            asked = [pool.submit(work.get_future) for _ in range(4)]
            futures = [each.result() for each in asked]
            group.barrier().wait()
            assert len(set(map(id, futures))) == 1, turn
            futures[0].wait()

    with ThreadPoolExecutor(4) as pool:
        try:
            run_ranks(2, main)
        finally:
            sys.setswitchinterval(interval)


def test_streams_need_not_wait_for_what_was_waited_for() -> None:
    def main(group: Any) -> None:
        for is_async in (False, True):
            options = c10d.AllreduceOptions()
            options.asyncOp = is_async
            tensor = torch.ones(2)
            work = group.allreduce([tensor], options)
            work.block_current_stream()
            assert work.is_success() and tensor.tolist() == [2, 2]

    run_ranks(2, main)


def test_the_end_of_a_coalescing_block_is_the_end_of_its_calls() -> None:
    """Of all that were begun in it, collectives and messages."""

    def main(group: Any) -> None:
        other, cpu = 1 - group.rank(), torch.device("cpu")
        options, gathering = c10d.AllreduceOptions(), c10d.AllgatherOptions()
        options.asyncOp = gathering.asyncOp = True
        value, whole, received = torch.ones(2), torch.empty(4), torch.empty(1)
        group._start_coalescing(cpu)
        group.allreduce([value], options)
        group.all_gather_single(whole, torch.full((2,), float(group.rank())), gathering)
        group.send([torch.full((1,), float(group.rank()))], other, 0)
        group.recv([received], other, 0)
        work = group._end_coalescing(cpu)
        assert not group.is_watched
        assert work.wait()
        assert value.tolist() == [2, 2] and whole.tolist() == [0, 0, 1, 1]
        assert received.item() == other

    run_ranks(2, main)


def test_a_sparse_all_reduce_waits_as_long_as_it_may() -> None:
    over = threading.Event()

    def main(group: Any) -> None:
        if group.rank() == 1:
            over.wait(200)
            return
        options = c10d.AllreduceOptions()
        options.timeout = timedelta(seconds=0.1)
        try:
            with pytest.raises(CollectiveTimeoutError, match=r"waited 0\.1"):
                group.allreduce([torch.eye(2).to_sparse()], options)
        finally:
            over.set()

    run_ranks(2, main)
