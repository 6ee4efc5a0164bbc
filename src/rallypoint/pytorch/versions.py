"""Differences between versions of PyTorch, found by asking PyTorch itself and not by its number.

The one exception is a version that has not been tested yet, which causes a warning.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rallypoint.base.errors import HostError
from rallypoint.process_group.groups.group import ProcessGroup

NEWEST_TESTED = (2, 15)

# From 2.14 on, a Backend can be written in Python, and lie below a group (rallypoint_group.py).
# Before, the group is all there is (base_group.py). It came with means to reconfigure groups.
HAS_BACKENDS = hasattr(c10d.Backend, "get_reconfigure_handle")

# Methods' names before 2.13, the only ones that groups of earlier versions have.
NAMES_BEFORE = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "gather_single": "gather_into_tensor",
}


@cache
def check() -> None:
    """Refuse a PyTorch that is too old, and say once if it is newer than any that was tested."""
    if not hasattr(c10d.AllreduceOptions, "asyncOp"):
        raise HostError(
            f"PyTorch {torch.__version__} is too old for the backend rallypoint, which needs 2.8 "
            "or newer: upgrade torch, or use gloo"
        )
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(
            f"rallypoint: PyTorch {torch.__version__} is newer than the newest tested, {newest}",
            stacklevel=2,
        )


def factor_of(op: dist.ReduceOp) -> float:
    """What PREMUL_SUM multiplies by; ReduceOp has no attribute for it before 2.13."""
    return float(op.factor if hasattr(op, "factor") else op.__getstate__()[1])


def method_of(group: dist.ProcessGroup, name: str) -> Any:  # noqa: ANN401 - a method of torch
    """A method of one of torch's groups, by its newest name."""
    return getattr(group, name, None) or getattr(group, NAMES_BEFORE[name])


def wrapped_for_debugging(
    backend: c10d.Backend, store: dist.Store, group: ProcessGroup
) -> c10d.Backend:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, the backend within one that compares calls by gloo.

    torch does this for backends, not for groups in Python.
    """
    if dist.get_debug_level() != dist.DebugLevel.DETAIL or not dist.is_gloo_available():
        return backend
    return dist.distributed_c10d._create_process_group_wrapper(
        wrapped_pg=backend,
        store_prefix=group.group_name,
        store=store,
        rank=group.own_rank,
        world_size=group.size(),
        timeout=group.timeout,
    )


def attach_flight_recorder(group: dist.ProcessGroup, global_ranks: list[int]) -> object:
    """torch's flight recorder for a group, if it is asked for; keep what this returns.

    torch itself attaches it from 2.15 on, asked or not, to groups of backends that do not say that
    they record themselves; it would cost each call some microseconds.
    """
    hook = getattr(c10d, "FlightRecorderHook", None)
    if hook is None or not _wants_recording():
        return None
    try:
        return hook.attach(group, global_ranks)
    except TypeError:  # 2.14's does not ask for the ranks
        return hook.attach(group)


@cache
def attach_recorders_ourselves() -> None:
    """Keep torch from attaching its flight recorder to groups of ours: it needs a backend in C++.

    It asks whether backends record themselves, and ours does: see attach_flight_recorder.
    """
    theirs: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    theirs.add("rallypoint")


def attach_nan_check(group: dist.ProcessGroup) -> None:
    """torch's check for NaN in what goes out, if it is asked for; it is of 2.14."""
    if wants_nan_check():
        hook: Any = vars(c10d)["NanCheckHook"]
        hook.attach(group)


def wants_nan_check() -> bool:
    """Whether calls are to be checked for NaN by torch."""
    return hasattr(c10d, "NanCheckHook") and os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1"


def _wants_recording() -> bool:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if value := os.environ.get(name):
            return int(value) > 0
    return False
