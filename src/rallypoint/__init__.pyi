"""The public names, each with the module it lives in; read by type checkers and by __init__.py."""

from rallypoint.base.error_file import record as record
from rallypoint.base.errors import AlreadyInitializedError as AlreadyInitializedError
from rallypoint.base.errors import CallerError as CallerError
from rallypoint.base.errors import CollectiveTimeoutError as CollectiveTimeoutError
from rallypoint.base.errors import DeadlockError as DeadlockError
from rallypoint.base.errors import HostError as HostError
from rallypoint.base.errors import InvalidArgumentError as InvalidArgumentError
from rallypoint.base.errors import InvalidTypeError as InvalidTypeError
from rallypoint.base.errors import MismatchError as MismatchError
from rallypoint.base.errors import NotInitializedError as NotInitializedError
from rallypoint.base.errors import OutOfMemoryError as OutOfMemoryError
from rallypoint.base.errors import PeerError as PeerError
from rallypoint.base.errors import PeerLostError as PeerLostError
from rallypoint.base.errors import QueueEmptyError as QueueEmptyError
from rallypoint.base.errors import RallypointError as RallypointError
from rallypoint.base.errors import RevokedError as RevokedError
from rallypoint.base.errors import StoreConnectionError as StoreConnectionError
from rallypoint.base.errors import StoreError as StoreError
from rallypoint.base.errors import StoreTimeoutError as StoreTimeoutError
from rallypoint.base.errors import SystemCallError as SystemCallError
from rallypoint.base.errors import WorkersFailedError as WorkersFailedError
from rallypoint.base.preemption import preempted as preempted
from rallypoint.base.preemption import time_left as time_left
from rallypoint.engine.communicator import ReduceOp as ReduceOp
from rallypoint.engine.step_record import progress as progress
from rallypoint.launch.api.spawn import spawn as spawn
from rallypoint.process_group.arrays import empty as empty
from rallypoint.process_group.calls.collectives import _coalescing_manager as _coalescing_manager
from rallypoint.process_group.calls.collectives import all_reduce as all_reduce
from rallypoint.process_group.calls.collectives import all_reduce_coalesced as all_reduce_coalesced
from rallypoint.process_group.calls.collectives import barrier as barrier
from rallypoint.process_group.calls.collectives import broadcast as broadcast
from rallypoint.process_group.calls.collectives import monitored_barrier as monitored_barrier
from rallypoint.process_group.calls.collectives import reduce as reduce
from rallypoint.process_group.calls.collectives import scan as scan
from rallypoint.process_group.calls.exchanges import all_gather as all_gather
from rallypoint.process_group.calls.exchanges import all_gather_coalesced as all_gather_coalesced
from rallypoint.process_group.calls.exchanges import (
    all_gather_into_tensor as all_gather_into_tensor,
)
from rallypoint.process_group.calls.exchanges import all_gather_single as all_gather_single
from rallypoint.process_group.calls.exchanges import all_to_all as all_to_all
from rallypoint.process_group.calls.exchanges import all_to_all_single as all_to_all_single
from rallypoint.process_group.calls.exchanges import gather as gather
from rallypoint.process_group.calls.exchanges import reduce_scatter as reduce_scatter
from rallypoint.process_group.calls.exchanges import reduce_scatter_single as reduce_scatter_single
from rallypoint.process_group.calls.exchanges import reduce_scatter_tensor as reduce_scatter_tensor
from rallypoint.process_group.calls.exchanges import scatter as scatter
from rallypoint.process_group.calls.objects import all_gather_object as all_gather_object
from rallypoint.process_group.calls.objects import broadcast_object_list as broadcast_object_list
from rallypoint.process_group.calls.objects import gather_object as gather_object
from rallypoint.process_group.calls.objects import recv_object_list as recv_object_list
from rallypoint.process_group.calls.objects import scatter_object_list as scatter_object_list
from rallypoint.process_group.calls.objects import send_object_list as send_object_list
from rallypoint.process_group.calls.point_to_point import P2POp as P2POp
from rallypoint.process_group.calls.point_to_point import batch_isend_irecv as batch_isend_irecv
from rallypoint.process_group.calls.point_to_point import irecv as irecv
from rallypoint.process_group.calls.point_to_point import isend as isend
from rallypoint.process_group.calls.point_to_point import recv as recv
from rallypoint.process_group.calls.point_to_point import send as send
from rallypoint.process_group.delegated.backends import Backend as Backend
from rallypoint.process_group.delegated.backends import (
    get_default_backend_for_device as get_default_backend_for_device,
)
from rallypoint.process_group.delegated.backends import is_available as is_available
from rallypoint.process_group.delegated.backends import is_backend_available as is_backend_available
from rallypoint.process_group.delegated.backends import is_gloo_available as is_gloo_available
from rallypoint.process_group.delegated.backends import is_hccl_available as is_hccl_available
from rallypoint.process_group.delegated.backends import is_mpi_available as is_mpi_available
from rallypoint.process_group.delegated.backends import is_nccl_available as is_nccl_available
from rallypoint.process_group.delegated.backends import is_ucc_available as is_ucc_available
from rallypoint.process_group.delegated.backends import is_xccl_available as is_xccl_available
from rallypoint.process_group.formation.device_mesh import DeviceMesh as DeviceMesh
from rallypoint.process_group.formation.device_mesh import init_device_mesh as init_device_mesh
from rallypoint.process_group.formation.opening import (
    destroy_process_group as destroy_process_group,
)
from rallypoint.process_group.formation.opening import form_process_group as form_process_group
from rallypoint.process_group.formation.opening import init_process_group as init_process_group
from rallypoint.process_group.formation.shrinking import SHRINK_ABORT as SHRINK_ABORT
from rallypoint.process_group.formation.shrinking import SHRINK_DEFAULT as SHRINK_DEFAULT
from rallypoint.process_group.formation.shrinking import shrink_group as shrink_group
from rallypoint.process_group.formation.subgroups import new_group as new_group
from rallypoint.process_group.formation.subgroups import new_subgroups as new_subgroups
from rallypoint.process_group.formation.subgroups import (
    new_subgroups_by_enumeration as new_subgroups_by_enumeration,
)
from rallypoint.process_group.formation.subgroups import split_group as split_group
from rallypoint.process_group.groups.debug import DebugLevel as DebugLevel
from rallypoint.process_group.groups.debug import get_debug_level as get_debug_level
from rallypoint.process_group.groups.debug import set_debug_level as set_debug_level
from rallypoint.process_group.groups.debug import (
    set_debug_level_from_env as set_debug_level_from_env,
)
from rallypoint.process_group.groups.default import GroupMember as GroupMember
from rallypoint.process_group.groups.default import default_pg_timeout as default_pg_timeout
from rallypoint.process_group.groups.default import get_backend as get_backend
from rallypoint.process_group.groups.default import get_backend_config as get_backend_config
from rallypoint.process_group.groups.default import get_global_rank as get_global_rank
from rallypoint.process_group.groups.default import get_group_rank as get_group_rank
from rallypoint.process_group.groups.default import get_node_local_rank as get_node_local_rank
from rallypoint.process_group.groups.default import get_pg_count as get_pg_count
from rallypoint.process_group.groups.default import (
    get_process_group_ranks as get_process_group_ranks,
)
from rallypoint.process_group.groups.default import get_rank as get_rank
from rallypoint.process_group.groups.default import get_world_size as get_world_size
from rallypoint.process_group.groups.default import group as group
from rallypoint.process_group.groups.default import is_initialized as is_initialized
from rallypoint.process_group.groups.default import (
    is_torchelastic_launched as is_torchelastic_launched,
)
from rallypoint.process_group.groups.default import revoke_process_group as revoke_process_group
from rallypoint.process_group.groups.distributed_sampler import (
    DistributedSampler as DistributedSampler,
)
from rallypoint.process_group.groups.group import ProcessGroup as ProcessGroup
from rallypoint.process_group.operators import PremulSum as PremulSum
from rallypoint.process_group.operators import premul_sum as premul_sum
from rallypoint.process_group.operators import supports_complex as supports_complex
from rallypoint.process_group.work import Future as Future
from rallypoint.process_group.work import Work as Work
from rallypoint.schedule.program import ProgramError as ProgramError
from rallypoint.store.client import TCPStore as TCPStore
from rallypoint.store.file import FileStore as FileStore
from rallypoint.store.local_store import HashStore as HashStore
from rallypoint.store.prefix import PrefixStore as PrefixStore
from rallypoint.store.store import Store as Store

__all__: list[str]
__version__: str
