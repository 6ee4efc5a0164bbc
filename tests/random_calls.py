"""Random calls of PyTorch's groups, which follow from a seed: for tests that compare two ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d

from rallypoint.base.errors import InvalidTypeError

c10d: Any = _distributed_c10d
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
OPERATORS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
SPECIAL = [0.0, -0.0, float("inf"), float("nan"), 1e-40]

# A call by a group: its work, and the tensors that it might change.
Call = Callable[["Draw", Any], tuple[Any, list[Any]]]


class Draw:
    """What the ranks do in one call; equal on all of them but for the items of their tensors.

    Args:
        device: of the tensors.
        tags: of messages, from this one on.
    """

    def __init__(
        self,
        seed: int,
        number: int,
        rank: int,
        ranks: int,
        *,
        device: str = "cpu",
        tags: int = 0,
    ) -> None:
        self.device, self.tags = device, tags
        self.chance = random.Random(f"{seed} {number}")
        self.own = torch.Generator().manual_seed(seed * 7919 + number * 31 + rank)
        self.rank, self.ranks = rank, ranks
        self.dtype = getattr(torch, self.chance.choice(DTYPES))
        self.operator = self.chance.choice(OPERATORS)
        self.factor = random.Random(f"{seed} {number} {rank}").choice([0.5, 3.0, 0.1])
        self.root = self.chance.randrange(ranks)
        self.is_async = self.chance.random() < 0.4
        self.is_strided = self.chance.random() < 0.3
        self.is_special = self.chance.random() < 0.3
        self.count = self.chance.choice([0, 1, 3, 100, 5000, 20000])

    def tensor(self, count: int | None = None) -> Any:
        """Of random items, which depend on the rank."""
        count = self.count if count is None else count
        items = torch.randn(count, generator=self.own, dtype=torch.float64) * 20
        if self.dtype.is_complex:
            items = torch.complex(items, items.flip(0) / 3)
        elif self.dtype.is_floating_point and self.is_special and count:
            chosen = torch.randint(len(SPECIAL), (count,), generator=self.own)
            items = torch.where(
                items > 10, torch.tensor(SPECIAL, dtype=torch.float64)[chosen], items
            )
        elif self.dtype in (torch.uint16, torch.uint32, torch.uint64):
            items = (items.abs() * 400).to(torch.int64)
        elif not self.dtype.is_floating_point:
            items = items.to(torch.int64)
        tensor = items.to(self.dtype).to(self.device)
        if not self.is_strided:
            return tensor
        wide = torch.zeros(count, 2, dtype=self.dtype, device=self.device)
        wide[:, 0] = tensor
        return wide[:, 0]

    def options(self, kind: Any) -> Any:
        options = kind()
        options.asyncOp = self.is_async
        if hasattr(options, "rootRank"):
            options.rootRank = self.root
        if hasattr(options, "reduceOp"):
            named = torch.distributed.ReduceOp
            options.reduceOp = (
                torch.distributed._make_nccl_premul_sum(self.factor)
                if self.operator == "PREMUL_SUM"
                else getattr(named, self.operator)
            )
        return options

    def sizes(self) -> list[list[int]]:
        """By rank and peer."""
        most = max(1, self.count // self.ranks)
        return [[self.chance.randrange(most) for _ in range(self.ranks)] for _ in range(self.ranks)]


def all_reduce(draw: Draw, group: Any) -> Any:
    tensor = draw.tensor()
    return group.allreduce([tensor], draw.options(c10d.AllreduceOptions)), [tensor]


def all_reduce_coalesced(draw: Draw, group: Any) -> Any:
    tensors = [draw.tensor(), draw.tensor(7)]
    options = draw.options(c10d.AllreduceCoalescedOptions)
    return group.allreduce_coalesced(tensors, options), tensors


def reduce(draw: Draw, group: Any) -> Any:
    tensor = draw.tensor()
    work = group.reduce([tensor], draw.options(c10d.ReduceOptions))
    return work, [tensor] if draw.rank == draw.root else []


def broadcast(draw: Draw, group: Any) -> Any:
    tensor = draw.tensor()
    return group.broadcast([tensor], draw.options(c10d.BroadcastOptions)), [tensor]


def all_gather(draw: Draw, group: Any) -> Any:
    sizes = draw.sizes()[0] if draw.chance.random() < 0.4 else [draw.count] * draw.ranks
    outputs = [draw.tensor(size) for size in sizes]
    source = draw.tensor(sizes[draw.rank])
    work = group.allgather([outputs], [source], draw.options(c10d.AllgatherOptions))
    return work, [*outputs, source]


def all_gather_single(draw: Draw, group: Any) -> Any:
    output = draw.tensor(draw.count * draw.ranks)
    source = draw.tensor()
    if draw.chance.random() < 0.4:  # in place
        source = output[draw.rank * draw.count : (draw.rank + 1) * draw.count]
    return group.all_gather_single(output, source, draw.options(c10d.AllgatherOptions)), [output]


def gather(draw: Draw, group: Any) -> Any:
    outputs = [[draw.tensor() for _ in range(draw.ranks)]] if draw.rank == draw.root else []
    source = draw.tensor()
    work = group.gather(outputs, [source], draw.options(c10d.GatherOptions))
    return work, [source, *(outputs[0] if outputs else [])]


def scatter(draw: Draw, group: Any) -> Any:
    target = draw.tensor()
    inputs = [[draw.tensor() for _ in range(draw.ranks)]] if draw.rank == draw.root else []
    return group.scatter([target], inputs, draw.options(c10d.ScatterOptions)), [target]


def reduce_scatter(draw: Draw, group: Any) -> Any:
    target = draw.tensor()
    inputs = [draw.tensor() for _ in range(draw.ranks)]
    work = group.reduce_scatter([target], [inputs], draw.options(c10d.ReduceScatterOptions))
    return work, [target, *inputs]


def reduce_scatter_single(draw: Draw, group: Any) -> Any:
    source = draw.tensor(draw.count * draw.ranks)
    target = draw.tensor()
    if draw.chance.random() < 0.4:  # in place
        target = source[draw.rank * draw.count : (draw.rank + 1) * draw.count]
    work = group.reduce_scatter_single(target, source, draw.options(c10d.ReduceScatterOptions))
    return work, [target]


def all_to_all_single(draw: Draw, group: Any) -> Any:
    options = draw.options(c10d.AllToAllOptions)
    if draw.chance.random() < 0.5:
        source = draw.tensor(draw.count * draw.ranks)
        is_in_place = draw.chance.random() < 0.2
        target = source if is_in_place else draw.tensor(draw.count * draw.ranks)
        return group.all_to_all_single(target, source, [], [], options), [target]
    sizes = draw.sizes()
    sent, received = sizes[draw.rank], [each[draw.rank] for each in sizes]
    target, source = draw.tensor(sum(received)), draw.tensor(sum(sent))
    return group.all_to_all_single(target, source, received, sent, options), [target]


def all_to_all(draw: Draw, group: Any) -> Any:
    sizes = draw.sizes()
    outputs = [draw.tensor(each[draw.rank]) for each in sizes]
    inputs = [draw.tensor(size) for size in sizes[draw.rank]]
    return group.alltoall(outputs, inputs, draw.options(c10d.AllToAllOptions)), outputs


class Both:
    """Two works as one."""

    def __init__(self, *works: Any) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def around(draw: Draw, group: Any) -> Any:
    """A message to the next rank, and one from the rank before."""
    sent, received = draw.tensor(), draw.tensor()
    tag = draw.tags + draw.chance.randrange(3)
    into = draw.chance.choice([None, (draw.rank - 1) % draw.ranks])
    source = None if into is None else (draw.rank - 1) % draw.ranks
    draw.is_async = True
    there = group.send([sent], (draw.rank + 1) % draw.ranks, tag)
    if source is None:
        back = group.recv_anysource([received], tag)
    else:
        back = group.recv([received], source, tag)
    return Both(there, back), [received]


CALLS: list[Call] = [all_reduce, all_reduce, all_reduce_coalesced, reduce, broadcast, all_gather]
CALLS += [all_gather_single, gather, scatter, reduce_scatter, reduce_scatter_single]
CALLS += [all_to_all_single, all_to_all, around]


def bits(tensors: list[Any]) -> list[bytes]:
    """Copies of their bytes, with one NaN for all: who converts it decides its lower bits."""
    copies = [each.clone().cpu().contiguous().reshape(-1) for each in tensors]
    for each in copies:
        for part in (each.real, each.imag) if each.is_complex() else (each,):
            if part.is_floating_point():
                part[part.isnan()] = float("nan")
    return [
        each.as_strided((len(each),), (1,)).view(torch.uint8).numpy().tobytes() for each in copies
    ]


def drawn_call(seed: int, number: int) -> Call:
    """One of the calls above."""
    return random.Random(f"{seed} {number} call").choice(CALLS)


def begun(call: Call, draw: Draw, group: Any) -> tuple[Any, list[Any]]:
    """A call's work, and its tensors; None, and none, if it was refused."""
    try:
        work, tensors = call(draw, group)
    except InvalidTypeError as error:
        assert "does not apply" in str(error)
        return None, []
    return work, tensors


def finished(work: Any) -> bool:
    """Wait for a work; whether the call was not refused."""
    try:
        if work is not None:
            work.wait()
    except InvalidTypeError as error:
        assert "does not apply" in str(error)
        return False
    return work is not None
