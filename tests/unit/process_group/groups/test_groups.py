"""Groups of some ranks: who is in them, how they form, and what their errors say."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.calls import collectives
from rallypoint.process_group.formation.subgroups import form_group
from rallypoint.process_group.groups.group import NON_GROUP_MEMBER, ProcessGroup
from tests.unit.process_group import ranks
from tests.unit.process_group.ranks import await_at_barrier, run_ranks


def test_members_reduce_and_others_pass_by() -> None:
    def main(world: ProcessGroup) -> None:
        me = world.rank()
        evens = form_group(world.world, [4, 0, 2])
        odds = form_group(world.world, [3, 1], sort_ranks=False)
        mine, other = (evens, odds) if me % 2 == 0 else (odds, evens)
        assert isinstance(mine, ProcessGroup)
        assert other == NON_GROUP_MEMBER == dist.GroupMember.NON_GROUP_MEMBER
        assert (dist.get_rank(other), dist.get_world_size(other)) == (-1, -1)
        members = [0, 2, 4] if me % 2 == 0 else [3, 1]
        assert dist.get_process_group_ranks(mine) == members
        assert dist.get_rank(mine) == members.index(me) == dist.get_group_rank(mine, me)
        assert dist.get_global_rank(mine, dist.get_rank(mine)) == me
        assert dist.get_backend(mine) == ranks.chosen_backend
        for calls in range(3):
            values = np.full(1 + 9_000 * calls, me)
            dist.all_reduce(values, group=mine)
            assert (values == sum(members)).all()
            dist.broadcast(values, src=members[-1], group=mine)
            dist.broadcast(values, group_src=0, group=mine)
            world_wide = np.ones(3)
            dist.all_reduce(world_wide, group=world)
            assert (world_wide == 5).all()
        with pytest.raises(ValueError, match="src=5 is not a rank of this group; its ranks are"):
            dist.broadcast(values, 5, mine)
        with pytest.raises(ValueError, match="global_rank=5"):
            dist.get_group_rank(mine, 5)
        if me == 0:  # the filter of warnings is the process's
            skipped: list[Callable[[], object]] = [
                lambda: dist.barrier(other),
                lambda: dist.all_reduce(np.ones(1), group=other),
            ]
            for call in skipped:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    assert call() is None
                assert "not in" in str(caught[0].message)

    run_ranks(5, main)


def test_only_members_know_of_a_group_by_its_ranks() -> None:
    def main(world: ProcessGroup) -> None:
        if world.rank() == 1:
            return
        for _ in range(3):
            group = form_group(world.world, [0, 2], by_ranks=True)
            assert isinstance(group, ProcessGroup)
            values = np.ones(2)
            dist.all_reduce(values, group=group)
            assert (values == 2).all()
            group.destroy()
            with pytest.raises(ValueError, match="was destroyed"):
                dist.barrier(group)

    run_ranks(3, main)


def test_others_pay_nothing() -> None:
    """Neither a key, nor memory, nor a wait: the store does not hear of them."""

    class Deaf:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked the store to {name}")

    def main(world: ProcessGroup) -> None:
        store, world.world.store = world.world.store, Deaf()  # type: ignore[assignment]
        for _ in range(1000):
            assert form_group(world.world, [1 - world.rank()]) == NON_GROUP_MEMBER
        world.world.store = store
        dist.barrier(world)

    run_ranks(2, main)


@pytest.mark.parametrize("ranks", [[0, 0], [], [7], ["1"]])
def test_ranks_that_make_no_group(ranks: list[int]) -> None:
    def main(world: ProcessGroup) -> None:
        with pytest.raises(ValueError, match="ranks"):
            form_group(world.world, ranks)

    run_ranks(1, main)


def test_missing_member_is_named_by_its_global_rank() -> None:
    def main(world: ProcessGroup) -> None:
        if world.rank() == 1:
            with pytest.raises(dist.StoreTimeoutError, match="missing: 3;"):
                form_group(world.world, [1, 3], timeout=timedelta(seconds=0.2))

    run_ranks(4, main)


def test_mismatch_names_global_ranks_calls_and_lines() -> None:
    def main(world: ProcessGroup) -> str | None:
        group = form_group(world.world, [1, 2, 3])
        if not isinstance(group, ProcessGroup):
            return None
        with pytest.raises(dist.MismatchError) as caught:
            if world.rank() == 2:
                dist.broadcast(np.ones(3), src=3, group=group)
            else:
                dist.all_reduce(np.ones(3), group=group)
        assert sorted(caught.value.calls) == [1, 2, 3]
        with pytest.raises(dist.MismatchError):
            dist.barrier(group)  # and so for ever
        return str(caught.value)

    first, *told = run_ranks(4, main)
    assert first is None
    for text in told:
        assert text.startswith("in the group of global ranks 1 to 3: ranks called different")
        assert "ranks 1, 3 called all_reduce(float64[3], SUM) at " in text
        assert "rank 2 called broadcast(float64[3], src=3) at " in text
        assert "test_groups.py:" in text


def test_sizes_of_all_to_all_that_disagree() -> None:
    def main(world: ProcessGroup) -> str:
        me = world.rank()
        sent = [1, 1, 5 if me == 1 else 1]
        with pytest.raises(dist.MismatchError) as caught:
            dist.all_to_all_single(np.ones(3), np.ones(sum(sent)), [1, 1, 1], sent, world)
            dist.barrier(world)  # a rank that was not concerned learns of it at the next call
        return str(caught.value)

    for text in run_ranks(3, main):
        assert "rank 1 has 40 bytes for rank 2, which expects 8" in text


def test_monitored_barrier_names_who_is_late_and_harms_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only rank 0 waits for a short time: for those that have not come when rank 2 has."""
    monkeypatch.setattr(collectives, "_GRACE", timedelta(seconds=200))

    def main(world: ProcessGroup) -> None:
        short = timedelta(seconds=0.1)
        for _ in range(3):
            dist.monitored_barrier(world)
        if world.rank() in (1, 3):
            dist.barrier(world)
            with pytest.raises(dist.CollectiveTimeoutError, match=r"missing after .*: 1, 3 "):
                dist.monitored_barrier(world, short)
        else:
            if world.rank() == 0:
                await_at_barrier(world, 2, 3)
            with pytest.raises(
                dist.CollectiveTimeoutError, match=r"missing after .*: 1, 3 "
            ) as caught:
                dist.monitored_barrier(world, short)
            assert caught.value.rank == 1
            dist.barrier(world)
        for _ in range(2):
            dist.monitored_barrier(world)

    run_ranks(4, main)


def test_monitored_barrier_has_one_verdict_also_if_rank_0_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only rank 1 waits for a short time, and gives up when rank 2 has come."""
    monkeypatch.setattr(collectives, "_GRACE", timedelta(0))
    told = threading.Barrier(3)

    def main(world: ProcessGroup) -> None:
        if world.rank() == 0:
            told.wait()  # the others have given up
        elif world.rank() == 1:
            await_at_barrier(world, 2, 0)
        wait = timedelta(seconds=0.1 if world.rank() == 1 else 200)
        with pytest.raises(dist.CollectiveTimeoutError, match=r"missing after .*: 0 ") as caught:
            dist.monitored_barrier(world, wait)
        assert caught.value.rank == 0
        if world.rank() > 0:
            told.wait()
        dist.monitored_barrier(world)

    run_ranks(3, main)


def test_monitored_barrier_speaks_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs look for these words, and its tests."""
    monkeypatch.setattr(collectives, "_GRACE", timedelta(seconds=200))
    told = threading.Barrier(4)

    def main(world: ProcessGroup) -> None:
        short, first = timedelta(seconds=0.1), "Rank 2 failed to pass monitoredBarrier in 0.1 s"
        cases = (
            (short, False, first),
            (short, True, first.replace("Rank 2", "Ranks 2, 3")),
            (timedelta(0), False, "Rank 0 timed out in monitoredBarrier after 0 s"),
        )
        for number, (wait, tells_all, words) in enumerate(cases):
            if world.rank() == 0 and wait:
                await_at_barrier(world, 1, number)
            if world.rank() == 0 or (world.rank() == 1 and wait):
                with pytest.raises(dist.CollectiveTimeoutError) as caught:
                    dist.monitored_barrier(world, wait, tells_all)
                told_before = (
                    "Rank 1 successfully reached monitoredBarrier, but received errors while "
                    "waiting for send/recv from rank 0: "
                )
                assert (told_before if world.rank() == 1 else "") + words in str(caught.value)
        told.wait()
        with pytest.raises(dist.InvalidArgumentError, match="must be positive"):
            dist.monitored_barrier(world, timedelta(seconds=-1))

    run_ranks(4, main)
