"""The switch RALLYPOINT_AS_GLOO=1: programs that ask PyTorch for gloo get our groups.

It serves programs that know backends by name only. PyTorch has one function that turns a backend's
name into a group; that function gets our name in place of gloo's. Afterwards PyTorch's tables hold
the requested name again, so that `get_backend()` returns "gloo". ProcessGroupGloo itself is not
changed. docs/decisions/064-programs.md describes the consequences.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rallypoint.base.worker_env import AS_GLOO

REAL_GLOO = "torch_gloo"  # a second name for PyTorch's own gloo
_GLOO, _OURS = "gloo", "rallypoint"

_has_printed = False


def install() -> None:
    """Have PyTorch create Rallypoint's groups where gloo is requested, if the environment asks for
    it.
    """
    value = os.environ.get(AS_GLOO, "")
    if value in ("", "0"):
        return
    if value != "1":
        _print(f"{AS_GLOO}={value!r} must be 0 or 1; gloo stays PyTorch's")
        return
    import torch.distributed.distributed_c10d as c10d

    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None or not {"backend", "group_rank"} <= inspect.signature(make).parameters.keys():
        _print(f"{AS_GLOO}=1 has no effect with this version of PyTorch; gloo stays PyTorch's")
        return
    if hasattr(c10d, "ProcessGroupGloo"):
        c10d.Backend.register_backend(REAL_GLOO, _real_gloo, devices=["cpu"])
    c10d._new_process_group_helper = _wrap(make)


def ours_for(backend: str, devices: str) -> str | None:
    """The backend to ask PyTorch for instead of `backend`; None if gloo is not in it.

    Args:
        devices: the same backends as pairs of device and backend, even if `backend` names no
            devices: "cpu:gloo,cuda:nccl".
    """
    if backend == _GLOO:
        return _OURS
    pairs = [pair.partition(":") for pair in devices.split(",")]
    if all(name != _GLOO for _, _, name in pairs):
        return None
    return ",".join(f"{device}:{_OURS if name == _GLOO else name}" for device, _, name in pairs)


def _wrap(make: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's function, which makes a group and its store, with our name in place of gloo's."""
    import torch.distributed.distributed_c10d as c10d

    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_group(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - of torch
        call = signature.bind(*args, **named)
        asked = c10d.Backend(str(call.arguments["backend"]))
        devices = str(c10d.BackendConfig(asked))
        ours = ours_for(asked, devices)
        if ours is None:
            return make(*args, **named)
        call.arguments["backend"] = c10d.Backend(ours)
        group, store = make(*call.args, **call.kwargs)
        if group in c10d._world.pg_map:  # otherwise this rank is not in it
            c10d._world.pg_map[group] = (asked, store)
            c10d._world.pg_backend_config[group] = devices
        _print_once(call.arguments["group_rank"])
        return group, store

    return make_group


def _real_gloo(store: object, rank: int, size: int, timeout: timedelta) -> object:
    import torch.distributed as dist

    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _print_once(group_rank: int | None) -> None:
    global _has_printed  # noqa: PLW0603 - one line in each job
    import torch.distributed as dist

    if not _has_printed and (dist.get_rank() if dist.is_initialized() else group_rank) == 0:
        _print(f"{AS_GLOO}=1: process groups of gloo run on Rallypoint's engine")
    _has_printed = True


def _print(line: str) -> None:
    print(f"rallypoint: {line}", file=sys.stderr, flush=True)
