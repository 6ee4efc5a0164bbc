"""Random calls in device memory, on the stand-in for a GPU, against the same calls by the engine.

Ranks are threads of one process. What is called follows from a seed alone. Results must have equal
bits, in all dtypes and with all operators. RALLYPOINT_TEST_OPERATIONS=10000 is the long run.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from tests.random_calls import Draw, begun, bits, drawn_call, finished  # noqa: E402
from tests.stand_in import OnStandIn, StandIn  # noqa: E402
from tests.unit.pytorch import ranks as torch_ranks  # noqa: E402

pytestmark = pytest.mark.needs_torch
CALLS = int(os.environ.get("RALLYPOINT_TEST_OPERATIONS", "300"))


class Moody(StandIn):
    """A stand-in that does not export every tensor: a rank's whim has all go by the host."""

    def __init__(self, device: object = None) -> None:
        super().__init__(device)
        self.chance = random.Random(0)
        self.exports = 0

    def export(self, flat: Any) -> Any:
        self.exports += 1
        if self.exports > 1 and self.chance.random() < 0.05:  # the first is the trial's
            return None
        return super().export(flat)


@pytest.mark.exact
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_calls_have_the_bits_of_the_engine(
    ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's direct algorithms combine in the order of ranks, and round once."""
    monkeypatch.setenv("RALLYPOINT_ALGORITHM", "direct")
    monkeypatch.setattr(OnStandIn, "memory_of", Moody)
    in_memory = [0] * ranks

    def main(group: Any) -> None:
        rank = group.rank()
        device, skew = OnStandIn(group), random.Random(seed + rank)
        waiting: list[tuple[Any, list[Any], list[bytes], str]] = []

        def finish() -> None:
            skew.shuffle(waiting)
            for work, tensors, wanted, what in waiting:
                if finished(work):
                    assert bits(tensors) == wanted, what
            waiting.clear()

        for number in range(CALLS):
            call = drawn_call(seed, number)
            draw = Draw(seed, number, rank, ranks)
            what = f"{call.__name__} #{number} {draw.dtype} {draw.operator} {draw.count}"
            draw.is_async, is_async = False, draw.is_async
            work, tensors = begun(call, draw, group)
            finished(work)
            wanted = bits(tensors)
            draw = Draw(seed, number, rank, ranks, tags=10)
            work, tensors = begun(call, draw, device)
            waiting.append((work, tensors, wanted, what))
            if skew.random() < 0.05:
                time.sleep(skew.random() / 500)
            if not is_async or len(waiting) > 8:
                finish()
        finish()
        memory: Any = device.calls()._mappings().memory
        in_memory[rank] = memory.exports
        group.barrier().wait()

    torch_ranks.run_ranks(ranks, main)
    assert min(in_memory) > CALLS / 2
