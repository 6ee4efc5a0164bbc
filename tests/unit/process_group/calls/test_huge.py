"""What is too large for caches is copied past them: at every alignment, each byte arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.long]

HUGE = 16 << 20
RANKS = 2


def guarded(count: int, offset: int) -> Any:
    """Bytes of 7 that begin so far from a cache line, between other bytes of 7."""
    memory = np.full(count + 256, 7, np.uint8)
    start = -memory.ctypes.data % 64 + 64 + offset
    return memory, memory[start : start + count]


def check(memory: Any, array: Any, due: Any) -> None:
    np.testing.assert_array_equal(array, due)
    array[:] = 7
    assert (memory == 7).all()  # what lies around it is as it was


@pytest.mark.parametrize(("more", "offset"), [(0, 0), (1, 63), (65, 1), (4094, 24)])
def test_every_byte_arrives(more: int, offset: int) -> None:
    count = HUGE + more
    given = np.random.default_rng(count).integers(0, 256, (RANKS, count), np.uint8)

    def main(group: ProcessGroup) -> None:
        rank, half = group.rank(), count // 2
        memory, array = guarded(count, offset)
        if rank == 0:
            array[:] = given[0]
        dist.broadcast(array, 0, group)
        check(memory, array, given[0])
        if rank == 0:
            dist.send(given[1], 1, group)
        else:
            dist.recv(array, 0, group)
            check(memory, array, given[1])
        memory, array = guarded(2 * half, offset)
        dist.all_gather_into_tensor(array, given[rank, :half], group)
        check(memory, array, given[:, :half].reshape(-1))
        dist.all_to_all_single(array, given[rank, : 2 * half], group=group)
        parts = given[:, : 2 * half].reshape(RANKS, RANKS, half)
        check(memory, array, parts[:, rank].reshape(-1))

    run_ranks(RANKS, main)
