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
        DeadlockError,
        HostError,
        InvalidArgumentError,
        InvalidTypeError,
        MismatchError,
        NotInitializedError,
        OutOfMemoryError,
        PeerError,
        PeerLostError,
        RallypointError,
        StoreConnectionError,
        StoreError,
        StoreTimeoutError,
        WorkersFailedError,
    )
    from rallypoint.base.preemption import preempted, time_left
    from rallypoint.engine.communicator import ReduceOp
    from rallypoint.launch.api.spawn import spawn
    from rallypoint.process_group.calls.all_to_all import all_to_all, all_to_all_single
    from rallypoint.process_group.calls.coalesced import (
        _coalescing_manager,
        all_gather_coalesced,
        all_reduce_coalesced,
    )
    from rallypoint.process_group.calls.collectives import (
        all_reduce,
        barrier,
        broadcast,
        monitored_barrier,
        reduce,
    )
    from rallypoint.process_group.calls.exchanges import (
        all_gather,
        all_gather_into_tensor,
        all_gather_single,
        gather,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        scatter,
    )
    from rallypoint.process_group.calls.objects import (
        all_gather_object,
        broadcast_object_list,
        gather_object,
        recv_object_list,
        scatter_object_list,
        send_object_list,
    )
    from rallypoint.process_group.calls.point_to_point import (
        P2POp,
        batch_isend_irecv,
        irecv,
        isend,
        recv,
        send,
    )
    from rallypoint.process_group.delegated.availability import (
        Backend,
        get_default_backend_for_device,
        is_available,
        is_backend_available,
        is_gloo_available,
        is_hccl_available,
        is_mpi_available,
        is_nccl_available,
    )
    from rallypoint.process_group.formation.init import (
        destroy_process_group,
        form_process_group,
        init_process_group,
    )
    from rallypoint.process_group.formation.subgroups import (
        new_group,
        new_subgroups,
        new_subgroups_by_enumeration,
        split_group,
    )
    from rallypoint.process_group.groups.groups import (
        GroupMember,
        ProcessGroup,
        get_backend,
        get_backend_config,
        get_global_rank,
        get_group_rank,
        get_node_local_rank,
        get_pg_count,
        get_process_group_ranks,
        get_rank,
        get_world_size,
        group,
        is_initialized,
        is_torchelastic_launched,
    )
    from rallypoint.process_group.groups.sampler import DistributedSampler
    from rallypoint.process_group.groups.timeouts import default_pg_timeout
    from rallypoint.process_group.memory.arena import empty
    from rallypoint.process_group.operators import PremulSum, premul_sum, supports_complex
    from rallypoint.process_group.work import Future, Work
    from rallypoint.schedule.program import ProgramError
    from rallypoint.store.client import TCPStore
    from rallypoint.store.file import FileStore
    from rallypoint.store.hash import HashStore
    from rallypoint.store.prefix import PrefixStore
    from rallypoint.store.store import Store

__all__ = [
    "AlreadyInitializedError",
    "Backend",
    "CallerError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DistributedSampler",
    "FileStore",
    "Future",
    "GroupMember",
    "HashStore",
    "HostError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "MismatchError",
    "NotInitializedError",
    "OutOfMemoryError",
    "P2POp",
    "PeerError",
    "PeerLostError",
    "PrefixStore",
    "PremulSum",
    "ProcessGroup",
    "ProgramError",
    "RallypointError",
    "ReduceOp",
    "Store",
    "StoreConnectionError",
    "StoreError",
    "StoreTimeoutError",
    "TCPStore",
    "Work",
    "WorkersFailedError",
    "_coalescing_manager",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "empty",
    "form_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_hccl_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "preempted",
    "premul_sum",
    "record",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "spawn",
    "split_group",
    "supports_complex",
    "time_left",
]

# room -> names; all others are errors
_ROOMS = {
    "base.error_file": "record",
    "base.preemption": "preempted time_left",
    "engine.communicator": "ReduceOp",
    "launch.api.spawn": "spawn",
    "process_group.calls.all_to_all": "all_to_all all_to_all_single",
    "process_group.memory.arena": "empty",
    "process_group.delegated.availability": (
        "Backend get_default_backend_for_device is_available is_backend_available "
        "is_gloo_available is_hccl_available is_mpi_available is_nccl_available"
    ),
    "process_group.calls.coalesced": (
        "_coalescing_manager all_gather_coalesced all_reduce_coalesced"
    ),
    "process_group.calls.collectives": "all_reduce barrier broadcast monitored_barrier reduce",
    "process_group.calls.exchanges": (
        "all_gather all_gather_into_tensor all_gather_single gather reduce_scatter "
        "reduce_scatter_single reduce_scatter_tensor scatter"
    ),
    "process_group.groups.groups": (
        "GroupMember ProcessGroup get_backend get_backend_config get_global_rank get_group_rank "
        "get_node_local_rank get_pg_count get_process_group_ranks get_rank get_world_size group "
        "is_initialized is_torchelastic_launched"
    ),
    "process_group.formation.init": "destroy_process_group form_process_group init_process_group",
    "process_group.calls.objects": (
        "all_gather_object broadcast_object_list gather_object recv_object_list "
        "scatter_object_list send_object_list"
    ),
    "process_group.groups.timeouts": "default_pg_timeout",
    "process_group.operators": "PremulSum premul_sum supports_complex",
    "process_group.calls.point_to_point": "P2POp batch_isend_irecv irecv isend recv send",
    "process_group.groups.sampler": "DistributedSampler",
    "process_group.formation.subgroups": (
        "new_group new_subgroups new_subgroups_by_enumeration split_group"
    ),
    "process_group.work": "Future Work",
    "schedule.program": "ProgramError",
    "store.client": "TCPStore",
    "store.file": "FileStore",
    "store.hash": "HashStore",
    "store.prefix": "PrefixStore",
    "store.store": "Store",
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Load a public name from its room on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'rallypoint' has no attribute {name!r}")
    room = _HOMES.get(name, "base.errors")
    value = getattr(importlib.import_module(f"rallypoint.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return __all__
