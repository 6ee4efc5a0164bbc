"""shrink_group, called by ranks that are threads; a real death is in tests/system."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.formation.subgroups import form_group
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks


def summed(group: ProcessGroup, value: float) -> float:
    mine = np.array([value])
    dist.all_reduce(mine, group=group)
    return float(mine[0])


@pytest.mark.parametrize("flags", [dist.SHRINK_DEFAULT, dist.SHRINK_ABORT])
def test_a_world_without_some_ranks_twice(flags: int) -> None:
    # Who aborts a group aborts a call in it that others have not left yet.
    summed_by_all = [threading.Barrier(3), threading.Barrier(2)]

    def main(group: ProcessGroup) -> list[float]:
        me = group.rank()
        beside = form_group(group.world, [0, 3])
        found = []
        for excluded in ([1], [0]):  # of ranks 0, 2, 3 the second time
            if group.rank() in excluded:
                break
            before, group = group, dist.shrink_group(excluded, group, flags)
            assert before.is_destroyed
            assert group.is_world
            assert group.ranks == tuple(range(group.size()))
            if isinstance(beside, ProcessGroup):
                assert beside.is_destroyed
            found.append(summed(group, 10**me))
            summed_by_all[len(found) - 1].wait()
        group.world.destroy()
        return found

    assert run_ranks(4, main) == [[1101], [], [1101, 1100], [1101, 1100]]


def test_another_group_keeps_its_world() -> None:
    def main(group: ProcessGroup) -> tuple[int, ...]:
        part = form_group(group.world, [3, 1, 2], sort_ranks=False)
        if not isinstance(part, ProcessGroup) or part.rank() == 0:
            return ()
        left = dist.shrink_group([0], part)
        assert part.is_destroyed and not group.is_destroyed
        assert group.world.subgroups == [left]
        assert summed(left, 1) == 2
        return left.ranks

    assert run_ranks(4, main) == [(), (1, 2), (1, 2), ()]


def test_work_under_way_is_aborted() -> None:
    def main(group: ProcessGroup) -> None:
        if group.rank() == 2:
            return
        work = dist.all_reduce(np.ones(3), group=group, async_op=True)
        left = dist.shrink_group([2], group, dist.SHRINK_ABORT)
        assert work is not None
        with pytest.raises(dist.RallypointError):
            work.wait()
        assert summed(left, 1) == 2
        left.world.destroy()

    run_ranks(3, main)


def test_what_makes_no_sense_is_refused() -> None:
    def main(group: ProcessGroup) -> None:
        for ranks, flags, message in (
            ([], 0, "at least one rank"),
            ([1, 1], 0, "each only once"),
            ([2], 0, "the group's ranks are 0 to 1"),
            ([group.rank()], 0, f"names this rank, {group.rank()}"),
            ([0, 1], 0, "names this rank"),
            ([1 - group.rank()], 7, "shrink_flags=7"),
        ):
            with pytest.raises(dist.InvalidArgumentError, match=message):
                dist.shrink_group(ranks, group, flags)
        with pytest.raises(dist.InvalidTypeError, match="a list of integers"):
            dist.shrink_group((1,), group)  # type: ignore[arg-type]
        assert summed(group, 1) == 2

    run_ranks(2, main)
