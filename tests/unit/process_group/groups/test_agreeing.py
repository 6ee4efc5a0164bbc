"""ProcessGroup.agree and revoke, called by ranks that are threads; deaths are in tests/system."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.base.collective import Collective
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.formation.subgroups import form_group
from rallypoint.process_group.groups import agreeing
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks

FLAGS = (0b1110, 0b0111, -1, 0b1101)


def all_reduce_alone(group: ProcessGroup) -> None:
    """The first half of agree."""
    flag = np.array([FLAGS[group.rank()]])
    group.communicator.run(int(Collective.ALL_REDUCE), ReduceOp.BAND, 0, flag, flag)


def test_the_flags_of_all() -> None:
    def main(group: ProcessGroup) -> list[int]:
        smallest = -(1 << 63) if group.rank() else -1
        return [group.agree(FLAGS[group.rank()]), group.agree(smallest)]

    assert run_ranks(4, main) == [[0b0100, -(1 << 63)]] * 4


@pytest.mark.parametrize("died", [[3], [0], [0, 2]])
@pytest.mark.parametrize("took_part", [False, True])
def test_the_flags_of_survivors(died: list[int], *, took_part: bool) -> None:
    """Also if one goes between the two halves of an agreement."""

    def main(group: ProcessGroup) -> list[int]:
        if group.rank() in died:
            if took_part:
                all_reduce_alone(group)
            group.world.destroy()
            return []
        return [group.agree(FLAGS[group.rank()]), group.agree(7), group.agree(group.rank() + 4)]

    survivors = [rank for rank in range(4) if rank not in died]
    found = [each for each in run_ranks(4, main) if each]
    assert found == [found[0]] * len(survivors)
    flags = [FLAGS[rank] for rank in (range(4) if took_part else survivors)]
    assert found[0][:2] == [np.bitwise_and.reduce(flags), 7]
    assert found[0][2] == np.bitwise_and.reduce([rank + 4 for rank in survivors])


def test_revoking_reaches_calls_that_wait_and_later_ones() -> None:
    def main(group: ProcessGroup) -> None:
        me, part = group.rank(), form_group(group.world, [0, 1, 2])
        assert isinstance(part, ProcessGroup)
        if me == 2:
            dist.revoke_process_group(part)
        calls: list[Callable[[], object]] = [
            lambda: dist.all_reduce(np.ones(1), group=part),
            lambda: dist.recv(np.ones(1), (me + 1) % 3, part),
            lambda: dist.barrier(part),
        ]
        for call in calls:
            with pytest.raises(dist.RevokedError, match=r"rank 2 \(pid \d+\) revoked the group"):
                call()
        work = dist.all_reduce(np.ones(1), group=part, async_op=True)
        assert work is not None and isinstance(
            work.exception() or pytest.raises(dist.RevokedError, work.wait).value, dist.RevokedError
        )
        assert part.agree(2 * me + 1) == 1
        left = dist.shrink_group(None, part)
        mine = np.array([me])
        dist.all_reduce(mine, group=left)
        assert mine == [3] and part.is_destroyed
        dist.barrier(group)  # the group that it came from is well

    run_ranks(3, main)


class Clock:
    """Time passes only while ranks 0 and 2 have come to the same decision, and quickly then."""

    def __init__(self) -> None:
        self._now = 0.0
        self.group: ProcessGroup | None = None

    def monotonic(self) -> float:
        if self._came(0) == self._came(2):
            self._now += 1000.0
        return self._now

    def _came(self, rank: int) -> list[bool]:
        assert self.group is not None
        keys = [f"{self.group.prefix}/{name}/{rank}" for name in ("agree/1", "shrink/1")]
        return [self.group.world.store.check([key]) for key in keys]


def test_who_does_not_come_in_time_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    late, clock = threading.Event(), Clock()
    monkeypatch.setattr(agreeing, "time", clock)

    def main(group: ProcessGroup) -> int:
        clock.group = group
        assert group.communicator is not None
        group.communicator.set_timeout(0.1)  # of the first attempt, without the store
        if group.rank() == 1:
            late.wait()
            with pytest.raises(dist.RevokedError, match="without this rank"):
                dist.shrink_group(None, group)
            return group.agree(4)  # told what the others have agreed on
        answer = group.agree(6)
        left = dist.shrink_group(None, group)
        assert left.size() == 2
        late.set()
        dist.barrier(left)
        left.world.destroy()
        return answer

    assert run_ranks(3, main) == [6, 6, 6]


def test_survivors_shrink_without_a_list() -> None:
    def main(group: ProcessGroup) -> list[int]:
        seen, me = list[int](), group.rank()
        # Who is done with the all_reduce must not abort it where it is still under way.
        for gone, flags in (([2], dist.SHRINK_ABORT), ([0, 4], dist.SHRINK_DEFAULT)):
            if me in gone:
                group.world.destroy()
                break
            group = dist.shrink_group(None, group, flags)
            mine = np.array([10**me])
            dist.all_reduce(mine, group=group)
            seen.append(int(mine[0]))
        return seen

    assert run_ranks(5, main) == [[11011], [11011, 1010], [], [11011, 1010], [11011]]


def test_what_is_no_flag() -> None:
    def main(group: ProcessGroup) -> None:
        for flag in (1 << 63, True, 1.0, None):
            with pytest.raises(dist.InvalidArgumentError, match="integer of 64 bits"):
                group.agree(flag)  # type: ignore[arg-type]
        group.destroy()
        for call in (group.revoke, lambda: group.agree(1)):
            with pytest.raises(dist.NotInitializedError):
                call()

    run_ranks(1, main)
