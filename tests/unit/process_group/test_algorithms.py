"""Algorithms that calls ask for: each serves its collective, and ranks find out if they differ.

Results are compared with NumPy's; ranks are threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group import planning
from rallypoint.process_group.formation import connecting
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.schedule.catalogue import ALGORITHMS
from rallypoint.schedule.choose import OWN_CORES_FEW_RANKS, Choice
from rallypoint.schedule.choose import choose as really_choose
from rallypoint.schedule.program import Collective
from tests.unit.process_group.ranks import run_ranks

RANKS = 3
COUNT = 30  # items of a block
SEED = 6
ROOT = 1

STAR = """
from rallypoint.schedule.program import (
    Buffer, Chunks, Collective, Incoming, Program, Reduce, Send, receive,
)

def star(team):
    own, result = Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, 0)
    others = tuple(range(1, team.ranks))
    def lanes(rank):
        if rank != 0:
            return ((Send(own, (0,)), receive(0, result)),)
        return ((Reduce((own, *map(Incoming, others)), (result,)), Send(result, others)),)
    return Program("star", Collective.ALL_REDUCE, team.ranks, chunks=1, sends=1, lanes=lanes)
"""


def inputs(blocks: int) -> list[Any]:
    chance = np.random.default_rng(SEED)
    return [chance.integers(-9, 9, (blocks, COUNT)) for _ in range(RANKS)]


def call(collective: Collective, group: ProcessGroup, algorithm: str) -> None:
    """Call it as users do, and compare with NumPy."""
    rank, ones, each = group.rank(), inputs(1), inputs(RANKS)
    own, blocks = ones[rank][0].copy(), each[rank].copy()
    total, gathered = sum(one[0] for one in ones), np.concatenate(ones)
    result = np.zeros(COUNT, np.int64)
    many = np.zeros((RANKS, COUNT), np.int64)
    is_root = rank == ROOT
    match collective:
        case Collective.ALL_REDUCE:
            dist.all_reduce(own, group=group, algorithm=algorithm)
            assert (own == total).all()
            work = dist.all_reduce(own, group=group, async_op=True, algorithm=algorithm)
            assert work is not None
            work.wait()
            assert (own == total * RANKS).all()
        case Collective.REDUCE:
            dist.reduce(own, ROOT, group=group, algorithm=algorithm)
            assert (own == (total if is_root else ones[rank][0])).all()
        case Collective.BROADCAST:
            dist.broadcast(own, ROOT, group=group, algorithm=algorithm)
            assert (own == ones[ROOT][0]).all()
        case Collective.ALL_GATHER:
            dist.all_gather_into_tensor(many, own, group=group, algorithm=algorithm)
            assert (many == gathered).all()
            many[...] = 0
            dist.all_gather(list(many), own, group=group, algorithm=algorithm)
            assert (many == gathered).all()
        case Collective.GATHER:
            dist.gather(own, list(many) if is_root else None, ROOT, group, algorithm=algorithm)
            assert (many == (gathered if is_root else 0)).all()
        case Collective.SCATTER:
            parts = list(blocks) if is_root else None
            dist.scatter(result, parts, ROOT, group, algorithm=algorithm)
            assert (result == each[ROOT][rank]).all()
        case Collective.REDUCE_SCATTER:
            dist.reduce_scatter_tensor(result, blocks, group=group, algorithm=algorithm)
            assert (result == sum(every[rank] for every in each)).all()
            result[...] = 0
            dist.reduce_scatter(result, list(blocks), group=group, algorithm=algorithm)
            assert (result == sum(every[rank] for every in each)).all()
        case Collective.ALL_TO_ALL:
            dist.all_to_all_single(many, blocks, group=group, algorithm=algorithm)
            assert (many == [every[rank] for every in each]).all()
        case Collective.SCAN:
            dist.scan(own, group=group, algorithm=algorithm)
            assert (own == sum(each[0] for each in ones[: rank + 1])).all()
        case Collective.BARRIER:
            dist.barrier(group, algorithm=algorithm)
        case _:
            pytest.fail(f"no call for {collective}")


CASES = [
    (collective, name)
    for collective, algorithms in ALGORITHMS.items()
    for name in algorithms
    if collective is not Collective.SEND
]


@pytest.mark.parametrize(("collective", "name"), CASES)
def test_each_algorithm_serves_a_call(collective: Collective, name: str) -> None:
    """Others before and after it in the same group."""

    def main(group: ProcessGroup) -> None:
        dist.barrier(group)
        for _ in range(2):
            call(collective, group, name)
        dist.barrier(group)

    run_ranks(RANKS, main)


@pytest.mark.parametrize("ranks", [5, 9])
def test_what_ranks_with_a_core_each_choose(
    ranks: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes on both sides of each limit; this machine need not have the cores."""
    chosen = set()

    def choose(*args: Any, **named: Any) -> Choice:
        choice = really_choose(*args, **named)
        chosen.add(choice.algorithm)
        return choice

    monkeypatch.setattr(planning, "choose", choose)
    monkeypatch.setattr(connecting, "own_cores", lambda: f"{(1 << ranks) - 1:x}")
    sizes = [1 << bits for bits in (1, 8, 10, 12, 15, 16)]  # of float32

    def main(group: ProcessGroup) -> None:
        rank = group.rank()
        for size in sizes:
            own = np.arange(size, dtype=np.float32) + rank
            mean = np.arange(size) + (ranks - 1) / 2
            for op, factor in ((dist.ReduceOp.SUM, ranks), (dist.ReduceOp.AVG, 1)):
                result = own.copy()
                dist.all_reduce(result, op, group)
                assert (result == mean * factor).all()
                block = np.empty(size, np.float32)
                dist.reduce_scatter_tensor(block, np.tile(own, ranks), op, group)
                assert (block == mean * factor).all()

    run_ranks(ranks, main)
    assert ("ring" in chosen) == (backend == "shm" and ranks > OWN_CORES_FEW_RANKS)


def test_blocks_of_different_lengths() -> None:
    """all_gather by Bruck's algorithm can; all_to_all's stores blocks elsewhere."""

    def main(group: ProcessGroup) -> None:
        rank = group.rank()
        lists = [np.zeros(place + 1) for place in range(RANKS)]
        dist.all_gather(lists, np.full(rank + 1, rank + 1.0), group, algorithm="bruck")
        assert [list(each) for each in lists] == [[1], [2, 2], [3, 3, 3]]
        with pytest.raises(dist.InvalidArgumentError, match="bruck cannot handle blocks of"):
            dist.all_to_all(lists, lists, group, algorithm="bruck")
        dist.barrier(group)

    run_ranks(RANKS, main)


def test_impossible_requests_leave_the_group_as_it_is() -> None:
    def main(group: ProcessGroup) -> None:
        array = np.ones(4)
        for name, error, words in (
            ("rong", dist.InvalidArgumentError, "there is no algorithm 'rong'; name one of"),
            ("bruck", dist.InvalidArgumentError, "all_reduce has no algorithm 'bruck'; it has"),
            ("no.py", dist.InvalidArgumentError, "cannot load an algorithm from no.py"),
            ("", dist.InvalidArgumentError, "algorithm is empty"),
            (3, dist.InvalidTypeError, "algorithm must be a name or the name of a file, not 3"),
        ):
            with pytest.raises(error, match=words):
                dist.all_reduce(array, group=group, algorithm=name)  # type: ignore[arg-type]
        dist.all_reduce(array, group=group)
        assert (array == 2).all()

    run_ranks(2, main)


def test_custom_file(tmp_path: Path) -> None:
    path = tmp_path / "star.py"
    path.write_text(STAR)

    def main(group: ProcessGroup) -> None:
        for count in (1, 1000, 200_000):
            array = np.full(count, group.rank() + 1.0)
            dist.all_reduce(array, group=group, algorithm=str(path))
            assert (array == 6).all()
        with pytest.raises(dist.InvalidArgumentError, match="algorithm for all_reduce, not for br"):
            dist.broadcast(array, 0, group=group, algorithm=f"{path}:star")

    run_ranks(RANKS, main)


def test_wrong_custom_file_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Nothing of it has run, so that the group goes on."""
    path = tmp_path / "star.py"
    path.write_text(STAR.replace("(Send(own, (0,)), receive(0, result))", "(Send(own, (0,)),)"))

    def main(group: ProcessGroup) -> None:
        array = np.full(5, 1.0)
        for async_op in (False, True):
            with pytest.raises(dist.ProgramError, match="rank 1 never takes this") as caught:
                dist.all_reduce(array, group=group, async_op=async_op, algorithm=str(path))
            error = caught.value
            assert (error.rank, error.lane, error.step, error.chunk) == (0, 0, 1, 0)
        dist.all_reduce(array, group=group)
        assert (array == RANKS).all()

    run_ranks(RANKS, main)


@pytest.mark.parametrize("async_op", [False, True])
def test_ranks_that_ask_for_different_algorithms(async_op: bool) -> None:
    def main(group: ProcessGroup) -> str:
        name = "ring" if group.rank() == 0 else "binomial_tree"
        with pytest.raises(dist.MismatchError) as caught:
            work = dist.all_reduce(np.ones(4), group=group, async_op=async_op, algorithm=name)
            assert work is not None
            work.wait()
        return str(caught.value)

    for text in run_ranks(2, main):
        assert "rank 0 called all_reduce(float64[4], SUM, algorithm=ring) at " in text
        assert "rank 1 called all_reduce(float64[4], SUM, algorithm=binomial_tree) at " in text
        assert text.count("test_algorithms.py:") == 2


def test_asking_for_what_would_be_chosen_anyway_must_be_done_by_all() -> None:
    """Else a program would work until its messages get larger."""

    def main(group: ProcessGroup) -> str:
        name = "direct_one_shot" if group.rank() == 0 else None
        with pytest.raises(dist.MismatchError) as caught:
            dist.all_reduce(np.ones(4), group=group, algorithm=name)
        return str(caught.value)

    for text in run_ranks(2, main):
        assert "rank 0 called all_reduce(float64[4], SUM, algorithm=direct_one_shot) at " in text
        assert "rank 1 called all_reduce(float64[4], SUM) at " in text


def test_ranks_with_different_files(tmp_path: Path) -> None:
    """Both are right; but they are not the same."""
    paths = [tmp_path / "one" / "star.py", tmp_path / "other" / "star.py"]
    for path, text in zip(paths, (STAR, STAR + "\n# newer\n"), strict=True):
        path.parent.mkdir()
        path.write_text(text)

    def main(group: ProcessGroup) -> str:
        with pytest.raises(dist.MismatchError) as caught:
            dist.all_reduce(np.ones(4), group=group, algorithm=str(paths[group.rank()]))
        return str(caught.value)

    for text in run_ranks(2, main):
        for rank, path in enumerate(paths):
            assert f"rank {rank} called all_reduce(float64[4], SUM, algorithm={path} (star-" in text


def test_equal_files_in_different_places_are_the_same(tmp_path: Path) -> None:
    paths = [tmp_path / "one.py", tmp_path / "other.py"]
    for path in paths:
        path.write_text(STAR)

    def main(group: ProcessGroup) -> None:
        array = np.ones(4)
        dist.all_reduce(array, group=group, algorithm=str(paths[group.rank()]))
        assert (array == 2).all()

    run_ranks(2, main)
