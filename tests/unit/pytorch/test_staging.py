"""The host memory of GPU tensors, without a GPU: what is in use, kept and let go."""

from __future__ import annotations

import gc
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch")

import rallypoint as dist  # noqa: E402
from rallypoint.base.collective import Collective  # noqa: E402
from rallypoint.engine.communicator import ReduceOp  # noqa: E402
from rallypoint.pytorch import memory, torch_calls  # noqa: E402
from rallypoint.pytorch.elastic import data_parallel  # noqa: E402
from rallypoint.pytorch.elastic.data_parallel import Reduction  # noqa: E402
from rallypoint.pytorch.memory import Pool, _class_of  # noqa: E402
from rallypoint.pytorch.torch_work import UNSET  # noqa: E402
from tests.unit.pytorch.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.needs_torch
MIB = 1 << 20


class Pages:
    """Which are locked, and whether more can be."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.is_full = False

    def lock(self, address: int, nbytes: int) -> bool:
        if not self.is_full:
            self.locked[address] = nbytes
        return not self.is_full

    def unlock(self, address: int, nbytes: int) -> bool:
        return self.locked.pop(address) == nbytes

    def pool(self) -> Pool:
        return Pool(self.lock, self.unlock)


def address(memory: Any) -> int:
    return int(memory.__array_interface__["data"][0])


@given(st.integers(1, 1 << 40))
def test_classes_of_sizes(nbytes: int) -> None:
    size = _class_of(nbytes)
    assert nbytes <= size <= nbytes * 1.125 + 1
    assert _class_of(size) == size


def test_memory_that_nothing_refers_to_is_taken_again() -> None:
    pages = Pages()
    pool = pages.pool()
    first = pool.take(3 * MIB)
    part = torch.from_numpy(first)[MIB:]
    place = address(first)
    del first
    second = pool.take(3 * MIB)
    assert address(second) != place  # a part of it is in use
    del part
    assert address(pool.take(3 * MIB)) == place
    assert len(pages.locked) == 2


def test_no_more_is_kept_than_was_in_use_at_one_time() -> None:
    pages = Pages()
    pool = pages.pool()
    for size in range(1, 40):
        memory = pool.take(size * MIB)
        assert sum(pages.locked.values()) <= 2.25 * size * MIB
        del memory
    two = [pool.take(39 * MIB) for _ in range(2)]
    assert len({address(each) for each in two}) == 2


def test_where_no_pages_can_be_locked_there_is_none() -> None:
    pages = Pages()
    pool = pages.pool()
    pages.is_full = True
    assert pool.take(MIB) is None
    pages.is_full = False  # nobody tries again, which would take its time in each call
    assert pool.take(MIB) is None


def test_nobodys_memory_is_given_away(seed: int) -> None:
    """Threads write a mark, and find it again."""
    pool = Pages().pool()
    wrong: list[str] = []

    def use(number: int) -> None:
        chance = random.Random(seed + number)
        held: list[tuple[Any, int]] = []
        for turn in range(300):
            memory = pool.take(chance.choice([1, 2, 3]) * MIB)
            mark = (number * 300 + turn) % 251
            assert memory is not None
            memory[:: 1 << 18] = mark
            held.append((memory, mark))
            if len(held) > chance.randrange(4):
                memory, mark = held.pop(chance.randrange(len(held)))
                wrong.extend(["overwritten"] * int((memory[:: 1 << 18] != mark).sum()))
                del memory

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    gc.collect()
    assert not wrong


class Event:
    """Of a stream; has passed when it is told so, or waited for."""

    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.has_passed = True


def test_gradients_are_reduced_in_order_whichever_is_on_the_host_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    arrivals: list[Event] = []
    begun: list[int] = []

    def on_host(tensor: Any) -> tuple[Any, Event]:
        arrivals.append(Event())
        arrivals[-1].has_passed = len(arrivals) == 2  # before the first
        return tensor.clone(), arrivals[-1]

    def counted(tensor: Any, op: ReduceOp, *, async_op: bool) -> Any:
        begun.append(int(tensor[0]))
        assert all(each.has_passed for each in arrivals[: len(begun)])
        tensor *= 10  # as if others had added theirs
        return dist.all_reduce(tensor, op, async_op=async_op)

    class Stream:
        def record_event(self) -> Event:
            return Event()

    class Layer(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_: Any, values: Any) -> Any:
            return values.clone()

        @staticmethod
        def backward(_: Any, gradients: Any) -> Any:
            for tensor in tensors:
                pass_.begin(tensor, ReduceOp.SUM)
            assert begun == []  # the first has not arrived
            return gradients

    monkeypatch.setattr(data_parallel, "_on_host", on_host)
    monkeypatch.setattr(data_parallel, "all_reduce", counted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    dist.init_process_group(init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        pass_ = Reduction(ReduceOp.SUM)
        tensors = [torch.full((3,), float(number)) for number in range(1, 4)]
        Layer.apply(torch.ones(1, requires_grad=True)).backward()
        assert begun == [1, 2, 3]
        assert [int(each[0]) for each in tensors] == [10, 20, 30]
    finally:
        dist.destroy_process_group()


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor that says that it is a GPU's; notes copies, and whether they are waited for."""

    is_cpu, is_cuda, device = False, True, torch.device("cuda", 0)
    notes: list[tuple[str, Any]] = []  # noqa: RUF012 - of all of them

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = [
                each.as_subclass(torch.Tensor) if isinstance(each, cls) else each for each in given
            ]
            result = function(*plain, **(named or {}))
            if function is torch.Tensor.copy_:
                direction = "to GPU" if isinstance(given[0], cls) else "to host"
                waits = not (named or {}).get("non_blocking", False)
                cls.notes.append((direction, waits))
            return result.as_subclass(cls) if function is torch.Tensor.detach else result


@pytest.fixture
def device_functions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What calls with OnDevice have a GPU do."""
    notes: list[tuple[str, Any]] = []

    def host_memory(tensor: Any) -> Any:
        notes.append(("memory", tensor.nbytes))
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    class Stream:
        def synchronize(self) -> None:
            notes.append(("stream", True))

    monkeypatch.setattr(OnDevice, "notes", notes)
    monkeypatch.setattr(memory, "host_memory", host_memory)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return notes


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("nbytes", [8, 64 << 10, MIB])
@pytest.mark.parametrize("is_async", [False, True])
def test_how_often_a_staged_call_waits_for_the_gpu(
    device_functions: list[tuple[str, Any]], is_async: bool, nbytes: int, is_strided: bool
) -> None:
    """The same for all sizes, unless memory must be waited for before it is used again."""

    def main(group: Any) -> None:
        tensor = torch.ones(nbytes // 4 * 2).as_subclass(OnDevice)
        tensor = tensor[::2] if is_strided else tensor[: nbytes // 4]
        tensor = tensor.as_subclass(OnDevice)
        options = SimpleNamespace(
            reduceOp=torch.distributed.ReduceOp(torch.distributed.ReduceOp.SUM),
            timeout=UNSET,
            asyncOp=is_async,
        )
        call = Collective.ALL_REDUCE, "all_reduce", tensor, tensor, options, (tensor,)
        group = group.engine_group
        torch_calls.collective_of_arrays(group, *call, root=0, in_place=True).wait()
        assert tensor.as_subclass(torch.Tensor).tolist() == [1.0] * (nbytes // 4)

    run_ranks(1, main)
    waits_at_end = is_async or nbytes >= MIB
    wanted = [("memory", nbytes), ("to host", True), ("to GPU", waits_at_end)]
    if is_async and is_strided:  # it is written by way of the GPU's memory
        wanted.append(("stream", True))
    assert device_functions == wanted
