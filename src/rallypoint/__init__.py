"""Rallypoint: start, gather, connect and keep alive the processes of a distributed training job.

The public face: torch.distributed's names. They are loaded on first use, so that the launcher,
which imports this package too, pays for none of them.

    import rallypoint as dist
    dist.init_process_group()
    dist.all_reduce(array)
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # true for type checkers; importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.base.error_file import record
    from rallypoint.base.errors import (
        AlreadyInitializedError,
        CallerError,
        CollectiveTimeoutError,
        HostError,
        InvalidArgumentError,
        InvalidTypeError,
        MismatchError,
        NotInitializedError,
        PeerError,
        PeerLostError,
        RallypointError,
        StoreConnectionError,
        StoreError,
        StoreTimeoutError,
        WorkersFailedError,
    )
    from rallypoint.engine.communicator import ReduceOp
    from rallypoint.launch.spawn import spawn
    from rallypoint.process_group.group import (
        ProcessGroup,
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        get_rank,
        get_world_size,
        is_initialized,
        recv,
        send,
    )
    from rallypoint.process_group.init import destroy_process_group, init_process_group
    from rallypoint.process_group.sampler import DistributedSampler

__all__ = [
    "AlreadyInitializedError",
    "CallerError",
    "CollectiveTimeoutError",
    "DistributedSampler",
    "HostError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "MismatchError",
    "NotInitializedError",
    "PeerError",
    "PeerLostError",
    "ProcessGroup",
    "RallypointError",
    "ReduceOp",
    "StoreConnectionError",
    "StoreError",
    "StoreTimeoutError",
    "WorkersFailedError",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "record",
    "recv",
    "send",
    "spawn",
]

_HOMES = {
    "DistributedSampler": "rallypoint.process_group.sampler",
    "ReduceOp": "rallypoint.engine.communicator",
    "destroy_process_group": "rallypoint.process_group.init",
    "init_process_group": "rallypoint.process_group.init",
    "record": "rallypoint.base.error_file",
    "spawn": "rallypoint.launch.spawn",
}


def __getattr__(name: str) -> object:
    """Load a public name from its room on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'rallypoint' has no attribute {name!r}")
    default = "base.errors" if name.endswith("Error") else "process_group.group"
    value = getattr(importlib.import_module(_HOMES.get(name, f"rallypoint.{default}")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return __all__
