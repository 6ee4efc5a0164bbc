"""Elastic DistributedDataParallel in one rank: what it refuses, and what it undoes after a loss."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import rallypoint as dist  # noqa: E402
from rallypoint import elastic  # noqa: E402
from rallypoint.base.errors import (  # noqa: E402
    InvalidArgumentError,
    NotInitializedError,
    PeerLostError,
)
from rallypoint.pytorch.elastic import DistributedDataParallel, data_parallel  # noqa: E402

pytestmark = pytest.mark.needs_torch


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def test_it_needs_a_default_group() -> None:
    with pytest.raises(NotInitializedError):
        DistributedDataParallel(network())


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"init_sync": False}, {"process_group": object()}]
)
def test_options_are_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidArgumentError, match=f"does not take {name}: "):
        DistributedDataParallel(network(), **options)


@pytest.mark.usefixtures("_group")
def test_layers_and_hooks_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="layer 0 has sparse gradients"):
        DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(InvalidArgumentError, match="layer of the model is a SyncBatchNorm"):
        DistributedDataParallel(torch.nn.SyncBatchNorm(4))
    with pytest.raises(InvalidArgumentError, match="parameter weight is on meta"):
        DistributedDataParallel(torch.nn.Linear(2, 2, device="meta"))
    model = DistributedDataParallel(network())
    with pytest.raises(InvalidArgumentError, match="does not take the hook network"):
        model.register_comm_hook(None, network)
    with pytest.raises(InvalidArgumentError, match="does not take the hook fp16"):
        model._register_builtin_comm_hook("fp16")
    with pytest.raises(InvalidArgumentError, match="has no join"):
        model.join()


def old(self: Any, module: Any, bucket_cap_mb: Any) -> None:
    """The constructor of PyTorch's class before 2.13, as far as ours looks at it."""


def test_sizes_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before PyTorch 2.13 there is one limit for all of them."""
    pytorchs, layout = torch.nn.parallel.DistributedDataParallel, data_parallel._layout

    def new(self: Any, module: Any, bucket_cap_mb: Any, bucket_cap_mb_list: Any) -> None:
        pass

    given = {"find_unused_parameters": False}
    monkeypatch.setattr(pytorchs, "__init__", new)
    assert layout(None, **given) == {"bucket_cap_mb_list": [1, 25], **given}
    assert layout(3, **given) == {"bucket_cap_mb_list": [3], **given}
    monkeypatch.setattr(pytorchs, "__init__", old)
    assert layout(3, **given) == {"bucket_cap_mb": 3, "find_unused_parameters": None}
    given = {"find_unused_parameters": True}
    assert layout(3, **given) == {"bucket_cap_mb": 3, **given}


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("finds_unused", [False, True])
def test_several_buckets_before_pytorch_2_13(
    monkeypatch: pytest.MonkeyPatch, finds_unused: bool
) -> None:
    """Those versions take a single one if an option `is False`; a step then has no overlap."""
    parallel: Any = torch.nn.parallel.distributed
    options = data_parallel._layout
    single: list[bool] = []

    def limits(self: Any, static_graph: bool, find_unused_parameters: Any) -> Any:
        single.append(static_graph is True or find_unused_parameters is False)
        return [sys.maxsize] if single[-1] else [self.bucket_bytes_cap], []

    def as_before(*given: Any, **named: Any) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(parallel.DistributedDataParallel, "__init__", old)
            return options(*given, **named)

    monkeypatch.setattr(parallel._BucketCapacityConfig, "compute_bucket_size_limits", limits)
    monkeypatch.setattr(data_parallel, "_layout", as_before)
    layers = [torch.nn.Linear(128, 128, bias=False) for _ in range(4)]  # 64 KiB each
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=0.125, find_unused_parameters=finds_unused
    )
    assert single == [False]
    state = elastic.State(model=model)
    state.sync()
    sizes: list[int] = []
    begin = data_parallel.Reduction.begin

    def counted(self: Any, tensor: Any, *others: Any) -> None:
        sizes.append(tensor.nbytes)
        begin(self, tensor, *others)

    monkeypatch.setattr(data_parallel.Reduction, "begin", counted)
    for _ in range(3):  # none is laid out again
        sizes.clear()
        model(torch.ones(2, 128)).sum().backward()
        assert [each for each in sizes if each > 1000] == [128 << 10] * 2
        with state.update():
            pass


@pytest.mark.usefixtures("_group")
def test_a_model_in_no_state_does_not_train() -> None:
    model = DistributedDataParallel(network())
    with torch.no_grad():
        model(torch.ones(2, 3))
    with pytest.raises(InvalidArgumentError, match="trains before it is part of a state"):
        model(torch.ones(2, 3))


@pytest.mark.usefixtures("_group")
def test_a_step_that_is_begun_again_leaves_no_trace() -> None:
    model = DistributedDataParallel(network())
    state = elastic.State(model=model)
    state.sync()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    model(torch.randn(2, 3)).sum().backward()
    assert not model.module[1].running_mean.equal(before["module.1.running_mean"])
    state.restore()
    assert all(each.equal(before[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())

    model(torch.randn(2, 3)).sum().backward()
    with state.update():
        pass
    statistics = model.module[1].running_mean.clone()
    state.restore()
    assert model.module[1].running_mean.equal(statistics)


@pytest.mark.usefixtures("_group")
def test_a_pass_that_ends_with_an_error_of_the_programs_is_forgotten() -> None:
    def fail(_: object) -> None:
        raise ArithmeticError

    model = DistributedDataParallel(torch.nn.Linear(3, 4))
    state = elastic.State(model=model)
    state.sync()
    handle = model.module.bias.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ArithmeticError):
        model(torch.ones(2, 3)).sum().backward()
    handle.remove()
    state.restore()
    model(torch.ones(2, 3)).sum().backward()
    assert model.module.bias.grad.equal(torch.full((4,), 2.0))


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("place", ["begin", "end", "abandoned"])
def test_a_loss_is_raised_as_what_it_is(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the RuntimeError that C++ makes of it; the step that is begun again is whole."""
    lost = PeerLostError("rank 1 is gone")

    class Lost:
        def wait(self) -> None:
            raise lost

    def lose(*_: object, **__: object) -> Lost:
        if place == "begin":
            raise lost
        return Lost()

    def fail(_: object) -> None:
        if place == "abandoned":  # while a reduction is under way
            raise ArithmeticError

    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model = DistributedDataParallel(net, bucket_cap_mb=1e-6)
    state = elastic.State(model=model)
    state.sync()
    handle = net[0].weight.register_post_accumulate_grad_hook(fail)
    with monkeypatch.context() as patch:
        patch.setattr(data_parallel, "all_reduce", lose)
        with pytest.raises(ArithmeticError if place == "abandoned" else PeerLostError):
            model(torch.ones(2, 3)).sum().backward()
        handle.remove()
        state.restore()
    assert all(each.grad is None for each in model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    assert net[1].bias.grad.equal(torch.full((2,), 2.0))


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["own", "views"])
@pytest.mark.parametrize("way", ["no_sync", "attribute"])
def test_gradients_may_be_accumulated(way: str, options: dict[str, Any]) -> None:
    """As nanoGPT does: the bits are those of the model alone."""
    plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model = DistributedDataParallel(copy.deepcopy(plain), **options)
    state = elastic.State(model=model)
    state.sync()
    trained = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for part in range(3):
            batch = torch.full((2, 3), float(step + part))
            is_last = part == 2
            if way == "attribute":
                model.require_backward_grad_sync = is_last
            with model.no_sync() if way == "no_sync" and not is_last else nullcontext():
                model(batch).sum().backward()
            plain(batch).sum().backward()
        with state.update():
            trained.step()
        trained.zero_grad()
        reference.step()
        reference.zero_grad()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.equal(its)
