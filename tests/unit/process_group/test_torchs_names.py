"""torch.distributed's smaller functions, and its order of arguments."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest

import rallypoint as dist
from rallypoint.process_group.operators import check_operator

# Defaults that differ on purpose: (function, argument) -> why.
OTHER_DEFAULTS = {
    ("get_process_group_ranks", "group"): "as everywhere else, no group is the default one",
    ("shrink_group", "ranks_to_exclude"): "without a list, the ranks that were lost",
}
# Public names of torch.distributed that have no counterpart here, and why.
OPTIONS = "of the calls of torch's C++ ProcessGroup, which NumPy's door does not have"
DDP = "the inside of DistributedDataParallel"
ERRORS = "errors are RallypointError's: docs/reference/exceptions.md"
NEWER = "of PyTorch 2.14 or 2.15; the names here are those of 2.13"
CLASS = "a backend's class; backends are named by text here"
LAUNCHING = "torch's rendezvous interface is in rallypoint.rendezvous"
OMITTED = {
    "AllToAllOptions": OPTIONS,
    "AllreduceCoalescedOptions": OPTIONS,
    "AllreduceOptions": OPTIONS,
    "BackendConfig": "get_backend_config() returns its text",
    "BarrierOptions": OPTIONS,
    "BroadcastOptions": OPTIONS,
    "BuiltinCommHookType": DDP,
    "DistBackendError": ERRORS,
    "DistError": ERRORS,
    "DistNetworkError": ERRORS,
    "DistStoreError": ERRORS,
    "GatherOptions": OPTIONS,
    "GradBucket": DDP,
    "GroupName": "a name for str in annotations",
    "Logger": DDP,
    "ProcessGroupGloo": CLASS,
    "ProcessGroupNCCL": CLASS,
    "ProcessGroupNCCL2": CLASS,
    "ProcessGroupNCCLLazy": CLASS,
    "RankType": "a name for int | SymInt in annotations",
    "ReduceOptions": OPTIONS,
    "ReduceScatterOptions": OPTIONS,
    "Reducer": DDP,
    "ScatterOptions": OPTIONS,
    "breakpoint": "it stops all ranks but one; `rallypoint stacks` shows where each one is",
    "gather_into_tensor": NEWER,
    "gather_single": NEWER,
    "get_backend_impl": NEWER,
    "log": "torch's own logger",
    "record_comm": "it tells torch's profiler of a call",
    "reduce_op": "torch's deprecated name of ReduceOp",
    "register_rendezvous_handler": LAUNCHING,
    "rendezvous": LAUNCHING,
    "set_timeout": NEWER,
}


def torchs() -> Any:
    return pytest.importorskip("torch").distributed


def default_of(parameter: inspect.Parameter) -> object:
    """Comparable between torch's arguments and ours: operators by name."""
    return getattr(parameter.default, "name", parameter.default)


def test_arguments_come_in_torchs_order() -> None:
    shared = [name for name in dist.__all__ if inspect.isfunction(getattr(torchs(), name, None))]
    assert len(shared) > 50
    for name in shared:
        theirs = [
            each
            for each in inspect.signature(getattr(torchs(), name)).parameters.values()
            if not each.name.startswith("_")
        ]
        ours = list(inspect.signature(getattr(dist, name)).parameters.values())
        names = [each.name for each in theirs]
        assert [each.name for each in ours][: len(names)] == names, name
        for own, other in zip(ours, theirs, strict=False):
            is_positional = other.kind is not inspect.Parameter.KEYWORD_ONLY
            assert is_positional <= (own.kind is not inspect.Parameter.KEYWORD_ONLY), (name, own)


def test_arguments_have_torchs_defaults() -> None:
    different = set()
    for name in dist.__all__:
        if not inspect.isfunction(function := getattr(torchs(), name, None)):
            continue
        ours = inspect.signature(getattr(dist, name)).parameters
        for other in inspect.signature(function).parameters.values():
            if other.name not in ours:  # private, or newer
                continue
            if default_of(ours[other.name]) != default_of(other):
                different.add((name, other.name))
    assert different == set(OTHER_DEFAULTS)


def test_every_name_of_torchs_is_here_or_left_out_for_a_reason() -> None:
    """Names that a newer PyTorch adds fail here, until somebody has decided."""
    ignored = {"contextlib", "sys", "timedelta"}  # what torch.distributed imports for itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # reduce_op
        theirs = {
            name
            for name in dir(torchs())
            if not name.startswith("_")
            and name not in ignored
            and not inspect.ismodule(getattr(torchs(), name))
        }
    missing = theirs - set(dist.__all__)
    assert missing - set(OMITTED) == set()
    assert not set(OMITTED) & set(dist.__all__)


def test_every_public_name_can_be_loaded() -> None:
    everything: dict[str, Any] = {}
    exec("from rallypoint import *", everything)
    assert set(dist.__all__) <= set(everything)
    assert dir(dist) == dist.__all__
    assert len(dist.__all__) > 90
    for name in dist.__all__:
        assert everything[name] is getattr(dist, name)
    with pytest.raises(AttributeError, match="no attribute 'all_reduced'"):
        dist.all_reduced  # type: ignore[attr-defined]  # noqa: B018


def test_backend_names() -> None:
    assert dist.Backend("GLOO") == dist.Backend.GLOO == torchs().Backend("GLOO") == "gloo"
    assert dist.Backend(dist.Backend.RALLYPOINT) == "rallypoint"


def test_is_backend_available() -> None:
    assert dist.is_backend_available("rallypoint")
    assert dist.is_backend_available("tcp")
    assert not dist.is_backend_available("no such thing")
    assert dist.is_backend_available("gloo") == dist.is_gloo_available()
    assert dist.is_backend_available("cpu:gloo,cuda:nccl") == (
        dist.is_gloo_available() and dist.is_nccl_available()
    )


def test_default_backend_for_a_device() -> None:
    torch = pytest.importorskip("torch")
    assert dist.get_default_backend_for_device("cpu") == "rallypoint"
    assert dist.get_default_backend_for_device(torch.device("cuda", 1)) == "nccl"
    assert dist.get_default_backend_for_device("npu:0") == "hccl"
    with pytest.raises(ValueError, match="no backend is known for 'tpu'"):
        dist.get_default_backend_for_device("tpu")


def test_what_a_group_is_made_of() -> None:
    assert dist.get_pg_count() == 0
    dist.init_process_group("SHM", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend_config() == "cpu:shm"
        one = dist.new_group([0])
        assert dist.get_pg_count() == 2
        assert isinstance(one, dist.ProcessGroup)
        dist.destroy_process_group(one)
        assert dist.get_pg_count() == 1
    finally:
        dist.destroy_process_group()


def test_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank(5) == torchs().get_node_local_rank(5) == 3
    monkeypatch.delenv("LOCAL_RANK")
    assert dist.get_node_local_rank(5) == torchs().get_node_local_rank(5) == 5
    with pytest.raises(dist.InvalidArgumentError, match="pass fallback_rank"):
        dist.get_node_local_rank()


def test_complex_numbers_have_sums_and_products_but_no_order() -> None:
    names = [name for name in dist.ReduceOp.__members__ if name != "PREMUL_SUM"]
    ours = {name for name in names if dist.supports_complex(dist.ReduceOp[name])}
    theirs = {name for name in names if torchs().supports_complex(getattr(torchs().ReduceOp, name))}
    assert ours == theirs | {"PRODUCT"}  # PyTorch has no products of complex numbers
    assert dist.supports_complex(dist.premul_sum(2))


def test_debug_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(dist.DebugLevel.__members__) == list(torchs().DebugLevel.__members__)
    for text, level in (("detail", "DETAIL"), ("INFO", "INFO"), ("", "OFF")):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", text)
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() is dist.DebugLevel[level]
    dist.set_debug_level(dist.DebugLevel.INFO)
    assert dist.get_debug_level() is dist.DebugLevel.INFO
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD")
    with pytest.raises(dist.InvalidArgumentError, match="LOUD is not one of OFF, INFO, DETAIL"):
        dist.set_debug_level_from_env()
    with pytest.raises(dist.InvalidTypeError, match="takes a DebugLevel"):
        dist.set_debug_level("INFO")  # type: ignore[arg-type]
    dist.set_debug_level(dist.DebugLevel.OFF)


def test_stores_and_constants() -> None:
    for name in ("Store", "TCPStore", "FileStore", "HashStore", "PrefixStore"):
        assert inspect.isclass(getattr(dist, name))
        assert hasattr(torchs(), name)
    assert dist.default_pg_timeout == torchs().distributed_c10d.default_pg_timeout


def test_torchs_operators_are_ours_too() -> None:
    theirs = torchs().ReduceOp
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        assert check_operator(getattr(theirs, name), "all_reduce") is dist.ReduceOp[name]
        assert check_operator(theirs(getattr(theirs, name)), "all_reduce") is dist.ReduceOp[name]
    factor = torchs()._make_nccl_premul_sum(2.5)
    if hasattr(factor, "factor"):  # from PyTorch 2.13 on
        assert check_operator(factor, "all_reduce") == dist.premul_sum(2.5)
    with pytest.raises(dist.InvalidArgumentError, match="needs a factor"):
        check_operator(theirs.PREMUL_SUM, "all_reduce")


def test_subgroups_are_those_of_hosts_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        own, all_ = dist.new_subgroups()
        assert all_ == [own]
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        with pytest.raises(dist.InvalidArgumentError, match="group_size must be given"):
            dist.new_subgroups()
    finally:
        dist.destroy_process_group()
