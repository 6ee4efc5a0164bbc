"""Operations of the PyTorch backend against torch's own arithmetic, in every form of tensor."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: E402

from rallypoint.base.errors import InvalidTypeError  # noqa: E402
from tests.unit.pytorch.ranks import run_ranks  # noqa: E402

c10d: Any = torch._C._distributed_c10d
pytestmark = pytest.mark.needs_torch

RANKS = (1, 2, 3)
REDUCES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


def inputs(ranks: int, shape: tuple[int, ...], seed: int, dtype: Any = torch.float32) -> list[Any]:
    """A tensor for each rank: small whole numbers, whose sums are exact in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 5, shape, generator=generator).to(dtype) for _ in range(ranks)]


def asynchronous(kind: Any, is_async: bool) -> Any:
    options = kind()
    options.asyncOp = is_async
    return options


def views(tensor: Any) -> dict[str, Any]:
    """The same items in memory that is laid out in other ways."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 1] = tensor
    return {
        "dense": tensor.clone(),
        "strided": wide[..., 1],
        "transposed": tensor.t().contiguous().t(),
        "with gradient": torch.nn.Parameter(tensor.clone())
        if tensor.is_floating_point()
        else tensor.clone(),
    }


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", REDUCES.values(), ids=REDUCES)
@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce_in_every_layout(ranks: int, dtype: Any, is_async: bool, seed: int) -> None:
    given = inputs(ranks, (7, 9), seed, dtype)
    total = torch.stack(given).sum(0).to(dtype)

    def main(group: Any) -> None:
        options = asynchronous(c10d.AllreduceOptions, is_async)
        for name, tensor in views(given[group.rank()]).items():
            group.allreduce([tensor], options).wait()
            assert torch.equal(tensor.detach(), total), name

    run_ranks(ranks, main)


@pytest.mark.parametrize("ranks", RANKS)
def test_operators(ranks: int, seed: int) -> None:
    given = inputs(ranks, (50,), seed)
    stacked = torch.stack(given)
    wanted = {
        c10d.ReduceOp.SUM: stacked.sum(0),
        c10d.ReduceOp.AVG: stacked.mean(0),
        c10d.ReduceOp.PRODUCT: stacked.prod(0),
        c10d.ReduceOp.MIN: stacked.amin(0),
        c10d.ReduceOp.MAX: stacked.amax(0),
        c10d._make_nccl_premul_sum(2.0): stacked.sum(0) * 2,
    }

    def main(group: Any) -> None:
        for operator, expected in wanted.items():
            options = c10d.AllreduceOptions()
            options.reduceOp = operator
            tensor = given[group.rank()].clone()
            group.allreduce([tensor], options).wait()
            torch.testing.assert_close(tensor, expected)

    run_ranks(ranks, main)


def test_premul_sum_has_a_factor_of_each_rank() -> None:
    def main(group: Any) -> None:
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d._make_nccl_premul_sum(10.0 ** group.rank())
        tensor = torch.ones(3)
        group.allreduce([tensor], options).wait()
        assert tensor.tolist() == [11, 11, 11]

    run_ranks(2, main)


def test_conjugated_and_negated_views() -> None:
    """Their memory does not hold their items."""

    def main(group: Any) -> None:
        source = torch.tensor([1 + 2j, 3 - 4j])
        total = source.conj()
        group.allreduce([total]).wait()
        assert total.tolist() == [2 - 4j, 6 + 8j]
        imaginary = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
        assert imaginary.is_neg()
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        if group.rank() == 1:
            imaginary.zero_()
        group.broadcast([imaginary], options).wait()
        assert imaginary.tolist() == [-2, 4]
        group.allreduce([imaginary]).wait()
        assert imaginary.tolist() == [-4, 8]

    run_ranks(2, main)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["conjugated", "negated"])
def test_moves_conjugated_and_negated_views(kind: str, is_async: bool) -> None:
    """Also to where memory holds items as they are, and back."""

    def view(tensor: Any) -> Any:
        return tensor.conj() if kind == "conjugated" else tensor.conj().imag

    def main(group: Any) -> None:
        rank = group.rank()
        own = view(torch.tensor([1 + 2j, 3 - 4j]) * (1 + rank))
        wanted = [
            view(torch.tensor([1 + 2j, 3 - 4j]) * (1 + other)).resolve_neg().resolve_conj()
            for other in range(2)
        ]
        plain = [torch.zeros_like(each) for each in wanted]
        gathered = asynchronous(c10d.AllgatherOptions, is_async)
        group.allgather([plain], [own], gathered).wait()
        assert_equal(torch.stack(plain), torch.stack(wanted))
        targets = [view(torch.zeros(2, dtype=torch.complex64)) for _ in range(2)]
        group.allgather([targets], [own], gathered).wait()
        assert_equal(torch.stack(targets), torch.stack(wanted))
        whole = torch.zeros(4, dtype=own.dtype)
        group.all_gather_single(whole, own, gathered).wait()
        assert_equal(whole, torch.cat(wanted))
        sent = asynchronous(c10d.BroadcastOptions, is_async)
        target = own if rank == 0 else torch.zeros(2, dtype=own.dtype)
        group.broadcast([target], sent).wait()
        assert_equal(target, wanted[0])
        came = torch.zeros(2, dtype=own.dtype)
        works = [group.send([own], 1 - rank, 0), group.recv([came], 1 - rank, 0)]
        for work in works:
            work.wait()
        assert_equal(came, wanted[1 - rank])

    run_ranks(2, main)


@pytest.mark.parametrize("is_async", [False, True])
def test_tensors_that_share_memory(is_async: bool) -> None:
    """The result is that of tensors that do not."""

    def main(group: Any) -> None:
        rank = group.rank()
        whole = torch.arange(6.0) + 10 * rank
        options = asynchronous(c10d.AllToAllOptions, is_async)
        group.all_to_all_single(whole, whole, [], [], options).wait()
        first = 3.0 * rank
        assert whole.tolist() == [first + i for i in range(3)] + [first + 10 + i for i in range(3)]
        parts = [torch.tensor([10.0 * rank + other]) for other in range(2)]
        group.alltoall(parts, parts[::1], options).wait()
        assert [float(part) for part in parts] == [rank, 10.0 + rank]
        gathered = asynchronous(c10d.AllgatherOptions, is_async)
        whole = torch.full((4,), float(rank))
        group.all_gather_single(whole, whole[2 * rank : 2 * rank + 2], gathered).wait()
        assert whole.tolist() == [0, 0, 1, 1]
        whole = torch.arange(4.0)
        group.all_gather_single(whole, whole[1:3], gathered).wait()
        assert whole.tolist() == [1, 2, 1, 2]
        whole = torch.arange(4.0)
        reduced = asynchronous(c10d.ReduceScatterOptions, is_async)
        group.reduce_scatter_single(whole[1:3], whole, reduced).wait()
        part = [0.0, 2.0] if rank == 0 else [4.0, 6.0]
        assert whole[1:3].tolist() == part

    run_ranks(2, main)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_short_way_is_taken(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every dense collective, waited for at once or later; whatever the group's time-out."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dense call went the long way")

    def main(group: Any) -> None:
        rank = group.rank()
        group.set_timeout(timedelta(seconds=20))
        one, whole = torch.ones(2), torch.ones(2 * ranks)
        many = [torch.ones(2) for _ in range(ranks)]
        at_root = [many] if rank == 0 else []
        for is_async in (False, True):

            def of(kind: Any) -> Any:
                return asynchronous(kind, is_async)  # noqa: B023

            works = [
                group.allreduce([one], of(c10d.AllreduceOptions)),
                group.broadcast([one], of(c10d.BroadcastOptions)),
                group.reduce([one], of(c10d.ReduceOptions)),
                group.allgather([many], [torch.ones(2)], of(c10d.AllgatherOptions)),
                group.all_gather_single(whole, torch.ones(2), of(c10d.AllgatherOptions)),
                group.gather(at_root, [torch.ones(2)], of(c10d.GatherOptions)),
                group.scatter([one], at_root, of(c10d.ScatterOptions)),
                group.reduce_scatter([torch.ones(2)], [many], of(c10d.ReduceScatterOptions)),
                group.reduce_scatter_single(one, whole, of(c10d.ReduceScatterOptions)),
                group.all_to_all_single(
                    torch.ones(2 * ranks), whole, [], [], of(c10d.AllToAllOptions)
                ),
                group.alltoall([torch.ones(2) for _ in many], many, of(c10d.AllToAllOptions)),
                group.barrier(opts=of(c10d.BarrierOptions)),
            ]
            for work in works:
                assert work.wait() and work.is_success()
        if ranks > 1 and rank < 2:
            works = [group.send([one], 1 - rank, 0), group.recv([torch.ones(2)], 1 - rank, 0)]
            for work in works:
                work.wait()

    monkeypatch.setattr("rallypoint.pytorch.torch_calls.run", refuse)
    monkeypatch.setattr("rallypoint.pytorch.torch_calls.post_message", refuse)
    run_ranks(ranks, main)


@pytest.mark.parametrize("ranks", RANKS)
def test_sparse_sums(ranks: int) -> None:
    def main(group: Any) -> None:
        rank = group.rank()
        places = torch.tensor([[rank, rank + 1], [0, 1]])
        tensor = torch.sparse_coo_tensor(
            places, torch.ones(2, 3), (ranks + 1, 2, 3), check_invariants=True
        )
        group.allreduce([tensor]).wait()
        wanted = torch.zeros(ranks + 1, 2, 3)
        for other in range(ranks):
            wanted[other, 0] += 1
            wanted[other + 1, 1] += 1
        assert torch.equal(tensor.to_dense(), wanted)
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX
        with pytest.raises(InvalidTypeError, match="sparse"):
            group.allreduce([tensor], options)

    run_ranks(ranks, main)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2]
)
@pytest.mark.parametrize("ranks", RANKS)
def test_moves_any_dtype_between_all(ranks: int, dtype: Any, seed: int) -> None:
    given = [tensor.to(dtype) for tensor in inputs(ranks, (ranks, 4), seed)]

    def main(group: Any) -> None:
        rank = group.rank()
        targets = [torch.zeros(ranks, 8).to(dtype)[:, ::2] for _ in range(ranks)]  # strided
        group.allgather([targets], [given[rank]]).wait()
        assert_equal(torch.stack(targets), torch.stack(given))
        whole = torch.zeros(ranks * ranks, 4).to(dtype)
        group.all_gather_single(whole, given[rank]).wait()
        assert_equal(whole, torch.cat(given))
        group.all_to_all_single(whole[:ranks], given[rank], [], []).wait()
        assert_equal(whole[:ranks], torch.stack([tensor[rank] for tensor in given]))

    run_ranks(ranks, main)


def assert_equal(one: Any, other: Any) -> None:
    assert torch.equal(one.to(torch.complex128), other.to(torch.complex128))


@pytest.mark.parametrize("ranks", RANKS)
def test_blocks_of_different_lengths(ranks: int) -> None:
    def main(group: Any) -> None:
        rank = group.rank()
        own = torch.full((2 * rank + 1,), float(rank))
        targets = [torch.empty(2 * other + 1) for other in range(ranks)]
        group.allgather([targets], [own]).wait()
        assert [target.tolist() for target in targets] == [
            [float(other)] * (2 * other + 1) for other in range(ranks)
        ]
        sizes_in = [rank + other for other in range(ranks)]  # symmetric: also what comes
        source = torch.cat([torch.full((n,), 10.0 * rank + i) for i, n in enumerate(sizes_in)])
        target = torch.empty(sum(sizes_in))
        group.all_to_all_single(target, source, sizes_in, sizes_in).wait()
        wanted = [10.0 * i + rank for i, n in enumerate(sizes_in) for _ in range(n)]
        assert target.tolist() == wanted

    run_ranks(ranks, main)


@pytest.mark.parametrize("ranks", RANKS)
def test_roots(ranks: int) -> None:
    def main(group: Any) -> None:
        rank, root = group.rank(), ranks - 1
        options = c10d.GatherOptions()
        options.rootRank = root
        gathered = [torch.empty(2) for _ in range(ranks)]
        group.gather(
            [gathered] if rank == root else [], [torch.full((2,), rank + 1.0)], options
        ).wait()
        if rank == root:
            assert [float(each[0]) for each in gathered] == [other + 1.0 for other in range(ranks)]
        whole = torch.zeros(4, ranks).t()[:, ::2]  # strided
        group.gather_single(whole, torch.full((2,), rank + 1.0), options).wait()
        dense = torch.zeros(2 * ranks)
        group.gather_into_tensor(dense, torch.full((2,), rank + 1.0), options).wait()
        wanted = [other + 1.0 if rank == root else 0.0 for other in range(ranks)]
        assert whole.tolist() == [[each] * 2 for each in wanted]
        assert dense.view(ranks, 2).tolist() == whole.tolist()
        options = c10d.ScatterOptions()
        options.rootRank = root
        own = torch.empty(2)
        parts = [torch.full((2,), other * 2.0) for other in range(ranks)]
        group.scatter([own], [parts] if rank == root else [], options).wait()
        assert own.tolist() == [rank * 2.0] * 2
        options = c10d.ReduceOptions()
        options.rootRank = root
        tensor = torch.ones(3)
        group.reduce([tensor], options).wait()
        assert tensor.tolist() == [float(ranks) if rank == root else 1.0] * 3

    run_ranks(ranks, main)


def test_coalesced_forms() -> None:
    def main(group: Any) -> None:
        rank = group.rank()
        tensors = [torch.full((n,), float(rank + n)) for n in (1, 5, 1000)]
        group.allreduce_coalesced(tensors).wait()
        group.allreduce_coalesced([], c10d.AllreduceCoalescedOptions()).wait()
        assert [float(tensor[0]) for tensor in tensors] == [3, 11, 2001]
        outputs = [[torch.empty(2), torch.empty(3)] for _ in range(2)]
        inputs = [torch.full((2,), float(rank)), torch.full((3,), 10.0 + rank)]
        group.allgather_coalesced(outputs, inputs).wait()
        assert [[float(each[0]) for each in of_rank] for of_rank in outputs] == [[0, 10], [1, 11]]
        wholes = [torch.empty(4), torch.empty(6)]
        group.all_gather_single_coalesced(wholes, inputs).wait()
        assert wholes[1].tolist() == [10, 10, 10, 11, 11, 11]
        parts = [torch.empty(2), torch.empty(3)]
        group.reduce_scatter_single_coalesced(parts, wholes).wait()
        assert parts[0].tolist() == [2.0 * rank] * 2

    run_ranks(2, main)


def test_messages_in_any_order(seed: int) -> None:
    def main(group: Any) -> None:
        rank, order = group.rank(), random.Random(seed + group.rank())
        other = 1 - rank
        sizes = [1, 100, 50_000]
        received = [torch.empty(size, 2)[:, 0] for size in sizes]
        works = [
            *(group.recv([tensor], other, tag) for tag, tensor in enumerate(received)),
            *(group.send([torch.full((n,), float(n))], other, tag) for tag, n in enumerate(sizes)),
        ]
        order.shuffle(works)
        for work in works:
            work.wait()
        assert [float(tensor.mean()) for tensor in received] == [1, 100, 50_000]
        value = torch.zeros(1)
        if rank == 0:
            work = group.recv_anysource([value], 7)
            work.wait()
            assert (work._source_rank(), float(value)) == (1, 5.0)
        else:
            group.send([torch.tensor([5.0])], 0, 7).wait()

    run_ranks(2, main)


@pytest.mark.parametrize("is_async", [False, True])
def test_results_of_functional_collectives(is_async: bool) -> None:
    """They are tensors without memory, which hold what they wait for."""

    def main(group: Any) -> None:
        def result() -> Any:
            options = asynchronous(c10d.AllreduceOptions, True)
            tensor = torch.ones(3)
            works.append(group.allreduce([tensor], options))
            late = AsyncCollectiveTensor(tensor)
            late.trigger_wait = lambda: works[-1].wait() and tensor  # torch knows it in C++
            return late

        works: list[Any] = []
        total = result()
        group.allreduce([total], asynchronous(c10d.AllreduceOptions, is_async)).wait()
        assert total.elem.tolist() == [4, 4, 4]
        outputs = [torch.empty(3), torch.empty(3)]
        options = asynchronous(c10d.AllgatherOptions, is_async)
        group.allgather([outputs], [result()], options).wait()
        assert [each.tolist() for each in outputs] == [[2, 2, 2], [2, 2, 2]]

    run_ranks(2, main)


def test_memory_can_still_be_resized() -> None:
    """torch's numpy() would forbid that for good; FSDP frees its parameters in this way."""

    def main(group: Any) -> None:
        tensor = torch.ones(4, 2)
        group.allreduce([tensor[:, 0]]).wait()
        group.allgather([[torch.empty(4, 2), torch.empty(4, 2)]], [tensor]).wait()
        tensor.untyped_storage().resize_(0)

    run_ranks(2, main)


def test_memory_in_use_outlives_its_tensor() -> None:
    """FSDP gives parameters other memory now and then."""
    has_swapped = [threading.Event(), threading.Event()]
    storages: Any = torch.UntypedStorage

    def main(group: Any) -> None:
        tensor = torch.zeros(4)
        if group.rank() == 1:
            assert has_swapped[0].wait(200)
            group.send([tensor], 0, 0).wait()
            assert has_swapped[1].wait(200)
            group.allreduce([tensor]).wait()
            return
        begins: Any = (lambda: group.recv([tensor], 1, 0), lambda: group.allreduce([tensor]))
        for begin, event in zip(begins, has_swapped, strict=True):
            memory = tensor.untyped_storage()._weak_ref()
            work = begin()
            tensor.data = torch.ones(4)
            assert not storages._expired(memory)
            event.set()
            work.wait()
            assert tensor.tolist() == [1, 1, 1, 1]
            storages._free_weak_ref(memory)

    run_ranks(2, main)


def test_an_error_of_a_coalesced_call_comes_when_nothing_changes_its_tensors_any_more() -> None:
    def main(group: Any) -> None:
        tensor, opts = torch.ones(3_000_000), c10d.AllreduceCoalescedOptions()
        with pytest.raises(NotImplementedError, match="meta tensor"):
            group.allreduce_coalesced([tensor, torch.ones(2, device="meta")], opts)
        assert bool((tensor == 2).all())

    run_ranks(2, main)


def test_after_an_exception_in_torchs_manager_calls_are_made_as_before() -> None:
    import torch.distributed as dist

    def main(group: Any) -> None:
        with (
            pytest.raises(ZeroDivisionError),
            dist._coalescing_manager(group, torch.device("cpu")),
        ):
            group.allreduce([torch.ones(3)]).wait()
            raise ZeroDivisionError
        assert group not in dist.distributed_c10d._world.pg_coalesce_state
        assert group._coalesced is None
        assert not group.is_watched
        work = group.allreduce([torch.ones(3)])
        work.wait()
        assert bool((work.result()[0] == 2).all())

    run_ranks(2, main)
