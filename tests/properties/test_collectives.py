"""Random calls on several groups at once, with random skew and by random algorithms, against NumPy.

Ranks are threads of one process, on one make-believe host, on two, or on one each. What is called
follows from a seed alone, so every rank knows what all others do, and what must come out.
RALLYPOINT_TEST_OPERATIONS=10000 is the long run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.unit.process_group.ranks import run_ranks

import rallypoint as dist
from rallypoint.process_group.formation.subgroups import form_group
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.planning import ranks_per_host
from rallypoint.schedule.catalogue import ALGORITHMS, Team
from rallypoint.schedule.program import Collective, ProgramError

OPERATIONS = int(os.environ.get("RALLYPOINT_TEST_OPERATIONS", "300"))
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]
REDUCE = {
    dist.ReduceOp.SUM: np.add,
    dist.ReduceOp.PRODUCT: np.multiply,
    dist.ReduceOp.MIN: np.minimum,
    dist.ReduceOp.MAX: np.maximum,
    dist.ReduceOp.BAND: np.bitwise_and,
    dist.ReduceOp.BOR: np.bitwise_or,
    dist.ReduceOp.BXOR: np.bitwise_xor,
}
NAMES = ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter"]
NAMES += ["all_to_all", "barrier", "send"]


@dataclass(frozen=True)
class Step:
    """One call: `members` are global ranks, `root` a rank among them."""

    seed: int
    number: int
    name: str
    group: int
    members: tuple[int, ...]
    root: int
    op: Any
    dtype: str
    shape: tuple[int, ...]
    strided: bool
    background: bool
    algorithm: str | None

    def block(self, rank: int, to: int = 0) -> Any:
        """What a rank puts in, for a receiver where there is one.

        Small whole numbers: sums and products of eight are exact in every dtype, or wrap round.
        """
        rng = np.random.default_rng([self.seed, self.number, rank, to])
        block = np.empty(self.shape, self.dtype)
        block[...] = rng.integers(0, 2, self.shape) if self.dtype == "bool" else self._small(rng)
        if self.dtype.startswith("complex"):
            block.imag = self._small(rng)
        return block

    def _small(self, rng: np.random.Generator) -> Any:
        return rng.integers(-2, 3, self.shape)

    def combined(self, to: int = 0) -> Any:
        total = self.block(self.members[0], to)
        for rank in self.members[1:]:
            total = REDUCE[self.op](total, self.block(rank, to))
        return total

    def laid_out(self, array: Any) -> Any:
        if not self.strided:
            return array.copy()
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 0] = array
        return wide[..., 0]


HOSTS: dict[str, Callable[[int, int], int]] = {  # where a rank of so many is
    "shm": lambda _rank, _ranks: 0,
    "tcp": lambda rank, _ranks: rank,
    "two hosts": lambda rank, ranks: 2 * rank // ranks,
}


def algorithm_for(rng: random.Random, name: str, hosts: list[int], root: int) -> str | None:
    """One that can serve a call, or None to have one chosen."""
    if name == "send" or rng.random() < 0.3:
        return None
    collective = Collective[name.upper()]
    chosen = rng.choice(list(ALGORITHMS[collective]))
    per_node = ranks_per_host(hosts)
    try:
        program = ALGORITHMS[collective][chosen](Team(len(hosts), root, per_node or 1))
    except ProgramError:
        return None
    # Ranks do not tell each other the lengths of lists' blocks, which might differ.
    cuts = program.chunks > 1 or program.scratch_chunks > 0
    return None if cuts and name == "all_to_all" else chosen


def drawn(
    rng: random.Random, seed: int, number: int, groups: list[tuple[int, ...]], hosts: list[int]
) -> Step:
    group = rng.randrange(len(groups))
    members = groups[group]
    dtype = rng.choice(DTYPES)
    ops = list(REDUCE)
    if dtype.startswith("complex"):
        ops = ops[:2]
    elif "float" in dtype:
        ops = ops[:4]
    rank = rng.choice([0, 1, 1, 2, 3])
    largest = rng.choice([4, 4, 30, 200]) if rank < 3 else 12
    name, root = rng.choice(NAMES), rng.randrange(len(members))
    return Step(
        seed,
        number,
        name,
        group,
        members,
        root,
        rng.choice(ops),
        dtype,
        tuple(rng.choice([0, *range(1, largest)]) for _ in range(rank)),
        strided=rng.random() < 0.3,
        background=rng.random() < 0.3,
        algorithm=algorithm_for(rng, name, [hosts[rank] for rank in members], root),
    )


def call(  # noqa: PLR0911 - one for each collective
    step: Step, group: ProcessGroup, me: int
) -> tuple[Any, Any, Any]:
    """Make the call: what may be waited for, what it filled in, and what it should have."""
    ranks, root = step.members, step.members[step.root]
    mine, is_root, behind = step.laid_out(step.block(me)), me == root, step.background
    options: dict[str, Any] = {"group": group, "async_op": behind, "algorithm": step.algorithm}
    fresh = [step.laid_out(np.zeros_like(mine)) for _ in ranks]
    row = [step.laid_out(step.block(me, to)) for to in ranks]
    match step.name:
        case "all_reduce":
            return dist.all_reduce(mine, step.op, **options), mine, step.combined()
        case "reduce":
            work = dist.reduce(mine, root, step.op, **options)
            return work, mine, step.combined() if is_root else step.block(me)
        case "broadcast":
            return dist.broadcast(mine, root, **options), mine, step.block(root)
        case "all_gather":
            work = dist.all_gather(fresh, mine, **options)
            return work, fresh, [step.block(rank) for rank in ranks]
        case "gather":
            work = dist.gather(mine, fresh if is_root else None, root, **options)
            wanted = [step.block(rank) if is_root else np.zeros_like(mine) for rank in ranks]
            return work, fresh, wanted
        case "scatter":
            work = dist.scatter(fresh[0], row if is_root else None, root, **options)
            return work, fresh[0], step.block(root, me)
        case "reduce_scatter":
            work = dist.reduce_scatter(fresh[0], row, step.op, **options)
            return work, fresh[0], step.combined(me)
        case "all_to_all":
            work = dist.all_to_all(fresh, row, **options)
            return work, fresh, [step.block(rank, me) for rank in ranks]
        case "send":
            receiver = ranks[(step.root + 1) % len(ranks)]
            if is_root and receiver != me:
                dist.send(mine, receiver, group, tag=step.number)
            elif me == receiver and not is_root:
                assert dist.recv(mine, root, group, tag=step.number) == root
                return None, mine, step.block(root)
            return None, mine, step.block(me)
    return dist.barrier(group, async_op=behind, algorithm=step.algorithm), [], []


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_random_calls_on_several_groups(
    backend: str, ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large messages on one host are copied, or read where they lie: as the seed has it."""
    monkeypatch.setenv("RALLYPOINT_DIRECT", str(seed % 2))
    rng = random.Random(seed)
    everyone = tuple(range(ranks))
    some = [tuple(sorted(rng.sample(everyone, rng.randint(1, ranks)))) for _ in range(3)]
    members = [everyone, *some]
    hosts = [HOSTS[backend](rank, ranks) for rank in everyone]
    steps = [drawn(rng, seed, number, members, hosts) for number in range(OPERATIONS)]

    def finish(waiting: list[tuple[Step, Any, Any, Any]]) -> None:
        for step, work, got, wanted in waiting:
            if work is not None:
                work.wait()
            np.testing.assert_array_equal(got, wanted, err_msg=str(step))
        waiting.clear()

    def main(world: ProcessGroup) -> None:
        me = world.rank()
        skew = random.Random(seed + me)
        groups = [world, *(form_group(world.world, part) for part in some)]
        waiting: list[tuple[Step, Any, Any, Any]] = []
        for step in steps:
            group = groups[step.group]
            if not isinstance(group, ProcessGroup):
                continue
            if skew.random() < 0.02:
                time.sleep(skew.random() / 200)
            waiting.append((step, *call(step, group, me)))
            if len(waiting) > 8 or waiting[-1][1] is None:
                skew.shuffle(waiting)
                finish(waiting)
        finish(waiting)
        dist.barrier(world)

    run_ranks(ranks, main)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_reductions_have_the_same_bits_everywhere(
    ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of floats depend on their order, which must be the same on every rank."""
    monkeypatch.setenv("RALLYPOINT_DIRECT", "1")

    def main(group: ProcessGroup) -> list[bytes]:
        bits = []
        for number, dtype in enumerate(["float16", "float32", "float64", "complex64"] * 6):
            count = int(np.random.default_rng([seed, number]).integers(0, 60_000))
            rng = np.random.default_rng([seed, number, group.rank()])
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
                array = rng.standard_normal(count).astype(dtype)
                dist.all_reduce(array, op, group)
                bits.append(array.tobytes())
        return bits

    first, *others = run_ranks(ranks, main)
    assert all(other == first for other in others)
