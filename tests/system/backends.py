"""What each rank does in test_backends.py: every collective with every dtype, at one backend.

    python backends.py BACKEND

Each rank compares with what NumPy says the result is, computed from all ranks' inputs, which every
rank knows. Rank 0 prints as JSON what each case gave: a digest, or the error that refused it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

import rallypoint as dist

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = [
    "float32",
    "float64",
    "float16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
    "complex128",
]
COMBINE: dict[str, Callable[[list[Array]], Array]] = {
    "SUM": lambda all_: np.logical_or.reduce(all_) if all_[0].dtype == bool else sum_(all_),
    "AVG": lambda all_: (sum_(all_) / len(all_)).astype(all_[0].dtype),
    "PRODUCT": lambda all_: np.prod(all_, axis=0, dtype=all_[0].dtype),
    "MIN": lambda all_: np.min(all_, axis=0),
    "MAX": lambda all_: np.max(all_, axis=0),
    "BAND": np.bitwise_and.reduce,
    "BOR": np.bitwise_or.reduce,
    "BXOR": np.bitwise_xor.reduce,
}
ITEMS = 24


def sum_(arrays: list[Array]) -> Array:
    return np.sum(arrays, axis=0, dtype=arrays[0].dtype)


def given(rank: int, dtype: str, items: int = ITEMS) -> Array:
    """Small whole numbers, of which every order of adding makes the same sum."""
    numbers = (np.arange(items) * (rank + 2) + rank) % 3
    if dtype.startswith("complex"):
        return (numbers + 1j * (numbers[::-1] % 2)).astype(dtype)
    return numbers.astype(dtype)


class Cases:
    """One rank's."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.root = self.ranks - 1
        self.told: dict[str, str] = {}

    def check(self, name: str, call: Callable[[], object], got: Any, expected: Any) -> None:
        """Make a call; `got` are its arrays, and what each is to be afterwards."""
        try:
            call()
        except (dist.InvalidTypeError, dist.InvalidArgumentError) as error:
            self.told[name] = f"{type(error).__name__}: {error}"
            return
        digest = hashlib.sha256()
        for one, other in zip(got, expected, strict=True):
            assert np.array_equal(one, other), f"{name}: {one} is not {other}"
            digest.update(np.ascontiguousarray(one).tobytes())
        self.told[name] = digest.hexdigest()

    def reductions(self, dtype: str, op: str) -> None:
        mine, operator = given(self.rank, dtype), dist.ReduceOp[op]
        all_ = [given(rank, dtype) for rank in range(self.ranks)]
        try:
            whole = COMBINE[op](all_).astype(dtype)
        except TypeError:
            return  # NumPy has none: bits of floats, an order of complex numbers
        name, is_root = f"{op} {dtype}", self.rank == self.root
        a = mine.copy()
        self.check(f"all_reduce {name}", lambda: dist.all_reduce(a, operator), [a], [whole])
        b = mine.copy()
        call = lambda: dist.reduce(b, self.root, operator)  # noqa: E731
        self.check(f"reduce {name}", call, [b], [whole if is_root else mine])
        part, size = np.zeros(ITEMS // self.ranks, dtype), ITEMS // self.ranks
        own = whole[self.rank * size : (self.rank + 1) * size]
        call = lambda: dist.reduce_scatter_tensor(part, mine, operator)  # noqa: E731
        self.check(f"reduce_scatter_tensor {name}", call, [part], [own])
        sizes = [rank + 1 for rank in range(self.ranks)]
        ends = np.cumsum(sizes)
        pieces = [mine[e - n : e].copy() for n, e in zip(sizes, ends, strict=True)]
        out = np.zeros(sizes[self.rank], dtype)
        call = lambda: dist.reduce_scatter(out, pieces, operator)  # noqa: E731
        own = whole[ends[self.rank] - sizes[self.rank] : ends[self.rank]]
        self.check(f"reduce_scatter {name}", call, [out], [own])

    def movements(self, dtype: str) -> None:
        ranks, rank, root = self.ranks, self.rank, self.root
        all_ = [given(each, dtype) for each in range(ranks)]
        mine = all_[rank]
        strided = np.zeros(2 * ITEMS, dtype)[::2]
        strided[:] = mine
        call: Callable[[], object] = lambda: dist.broadcast(strided, root)  # noqa: E731
        self.check(f"broadcast {dtype}", call, [strided], [all_[root]])
        whole = np.zeros(ranks * ITEMS, dtype)
        call = lambda: dist.all_gather_into_tensor(whole, mine)  # noqa: E731
        self.check(f"all_gather_into_tensor {dtype}", call, [whole], [np.concatenate(all_)])
        whole[:] = 0
        whole[rank * ITEMS : (rank + 1) * ITEMS] = mine
        own = whole[rank * ITEMS : (rank + 1) * ITEMS]
        call = lambda: dist.all_gather_into_tensor(whole, own)  # noqa: E731
        self.check(
            f"all_gather_into_tensor in place {dtype}", call, [whole], [np.concatenate(all_)]
        )
        uneven = [given(each, dtype, each + 1) for each in range(ranks)]
        outs = [np.zeros(each + 1, dtype) for each in range(ranks)]
        call = lambda: dist.all_gather(outs, uneven[rank])  # noqa: E731
        self.check(f"all_gather {dtype}", call, outs, uneven)
        even = [np.zeros(ITEMS, dtype) for _ in range(ranks)] if rank == root else None
        call = lambda: dist.gather(mine, even, root)  # noqa: E731
        self.check(f"gather {dtype}", call, even or [], all_ if rank == root else [])
        got = np.zeros(ITEMS, dtype)
        call = lambda: dist.scatter(got, all_ if rank == root else None, root)  # noqa: E731
        self.check(f"scatter {dtype}", call, [got], [mine])
        size = ITEMS // ranks
        single = np.zeros(size * ranks, dtype)
        parts = [each[rank * size : (rank + 1) * size] for each in all_]
        call = lambda: dist.all_to_all_single(single, mine[: size * ranks])  # noqa: E731
        self.check(f"all_to_all_single {dtype}", call, [single], [np.concatenate(parts)])
        sends = [given(rank, dtype, 1 + (rank + to) % 3) for to in range(ranks)]
        takes = [np.zeros(1 + (rank + from_) % 3, dtype) for from_ in range(ranks)]
        theirs = [given(from_, dtype, 1 + (rank + from_) % 3) for from_ in range(ranks)]
        call = lambda: dist.all_to_all(takes, sends)  # noqa: E731
        self.check(f"all_to_all {dtype}", call, takes, theirs)
        self.check(f"send {dtype}", lambda: self._around(mine, got), [got], [all_[rank - 1]])

    def _around(self, mine: Array, got: Array) -> None:
        """Each sends to the next one; the receiver does not say from whom."""
        sent = dist.isend(mine, (self.rank + 1) % self.ranks, tag=3)
        received = dist.irecv(got, (self.rank - 1) % self.ranks, tag=3)
        assert sent is not None
        assert received is not None
        assert received.wait(timedelta(seconds=60))
        while not sent.is_completed():
            time.sleep(0.001)
        assert sent.wait()
        assert received.is_success()
        assert received.source_rank() == (self.rank - 1) % self.ranks

    def other_calls(self) -> None:
        ranks, rank = self.ranks, self.rank
        dist.barrier()
        objects: list[Any] = [None] * ranks
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        assert objects == [{"rank": each, "text": "x" * each} for each in range(ranks)]
        listed = [("from", 0), 1.5] if rank == 0 else [None, None]
        dist.broadcast_object_list(listed)
        assert listed == [("from", 0), 1.5]
        gathered: list[Any] | None = [None] * ranks if rank == 1 else None
        dist.gather_object("y" * rank, gathered, 1)
        assert gathered is None or gathered == ["y" * each for each in range(ranks)]
        mine = [None]
        dist.scatter_object_list(mine, [[each] * each for each in range(ranks)], 0)
        assert mine == [[rank] * rank]
        works = [dist.all_reduce(np.ones(5), async_op=True) for _ in range(3)]
        assert [work.get_future().wait()[0][0] for work in works if work] == [ranks] * 3
        arrays = [np.full(4, rank + 1.0), np.full(2, 1.0)]
        with dist._coalescing_manager():
            for array in arrays:
                dist.all_reduce(array)
        assert [array[0] for array in arrays] == [ranks * (ranks + 1) / 2, ranks]
        odd = dist.new_group([ranks - 1, 0])
        if rank in (0, ranks - 1):
            one = np.ones(1)
            dist.all_reduce(one, group=odd)
            assert one[0] == 2
            assert isinstance(odd, dist.ProcessGroup)
            assert dist.get_backend(odd) == dist.get_backend()
        beside = dist.new_group(backend="rallypoint")
        assert isinstance(beside, dist.ProcessGroup)
        assert dist.get_backend(beside) == "rallypoint"
        dist.all_reduce(arrays[1], group=beside)
        assert arrays[1][0] == ranks * ranks
        dist.destroy_process_group(beside)
        from_any = np.zeros(2)
        if rank == 0:
            assert sorted(dist.recv(from_any, tag=9) for _ in range(ranks - 1)) == [
                *range(1, ranks)
            ]
        else:
            dist.send(np.full(2, float(rank)), 0, tag=9)
        dist.monitored_barrier()

    def errors(self) -> dict[str, str]:
        """What wrong arguments are answered with; nobody communicates."""
        array, told = np.ones(4), {}
        wrong: dict[str, Callable[[], object]] = {
            "no array": lambda: dist.all_reduce([1.0]),  # type: ignore[arg-type]
            "no operator": lambda: dist.all_reduce(array, "sum"),  # type: ignore[arg-type]
            "dtype": lambda: dist.all_reduce(np.array(["a"])),
            "read-only": lambda: dist.all_reduce(np.frombuffer(b"12345678", np.float64)),
            "root": lambda: dist.broadcast(array, 99),
            "both roots": lambda: dist.broadcast(array, 0, group_src=0),
            "list": lambda: dist.all_gather([array] * (self.ranks + 1), array),
            "sizes": lambda: dist.all_gather_into_tensor(np.ones(3), array),
            "dtypes": lambda: dist.all_gather_into_tensor(
                np.ones(4 * self.ranks, np.float32), array
            ),
            "to itself": lambda: dist.send(array, self.rank),
            "timeout": lambda: dist.barrier(timeout=3),  # type: ignore[arg-type]
            "group": lambda: dist.new_group([0, 0]),
        }
        for name, call in wrong.items():
            try:
                call()
            except dist.CallerError as error:
                told[name] = f"{type(error).__name__}: {error}"
        return told


def tensors() -> None:
    """PyTorch's, where it is there: a dtype that NumPy lacks."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    ranks = dist.get_world_size()
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
    dist.all_reduce(tensor)
    expected = ranks * torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
    assert torch.equal(tensor, expected)
    gathered = [torch.zeros(3, 2, dtype=torch.bfloat16) for _ in range(ranks)]
    dist.all_gather(gathered, tensor)
    assert all(torch.equal(each, tensor) for each in gathered)


def main() -> None:
    dist.init_process_group(sys.argv[1])
    cases = Cases()
    assert dist.get_backend() == sys.argv[1]
    for dtype in DTYPES:
        cases.movements(dtype)
        for op in COMBINE:
            cases.reductions(dtype, op)
    cases.other_calls()
    tensors()
    told: list[Any] = [None] * cases.ranks
    dist.all_gather_object(told, cases.told)
    names = [sorted(each) for each in told]
    assert names.count(names[0]) == len(names)
    if cases.rank == 0:
        print(json.dumps({"cases": told, "errors": cases.errors()}), flush=True)
    else:
        cases.errors()
    dist.destroy_process_group()
    if sys.argv[1] == "gloo":
        os._exit(0)  # else one of its threads may abort the process (pytorch/pytorch#190489)


main()
