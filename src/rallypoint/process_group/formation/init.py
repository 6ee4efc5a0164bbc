"""Forms and dissolves the default process group, and groups beside it.

`opening` forms a group; this module decides which one is the default group.
"""

from __future__ import annotations

from datetime import timedelta

from rallypoint.base.errors import (
    AlreadyInitializedError,
    HostError,
    InvalidArgumentError,
    PeerError,
    SystemCallError,
)
from rallypoint.process_group.formation.leaving import leave
from rallypoint.process_group.formation.opening import WorldRequest, base_of_round, open_world
from rallypoint.process_group.formation.own_place import await_place, take_next_place
from rallypoint.process_group.groups.default import Group, GroupMember, resolve, set_default
from rallypoint.process_group.groups.group import NON_GROUP_MEMBER, GroupStatus, ProcessGroup
from rallypoint.store.store import Store


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: object = None,
    *,
    algorithm: str | None = None,
    links: str | None = None,
) -> None:
    """Form the default process group; every rank of the job must call it.

    While ranks wait, the lowest rank present prints the missing ranks every 10 s.

    Args:
        backend: "rallypoint": shared memory within a machine and TCP between machines; "shm":
            shared memory, one machine; "tcp": TCP between any two ranks; or another library:
            "gloo", "nccl", "hccl", "mpi", or one for each kind of device, as in
            "cpu:gloo,cuda:nccl" (docs/guides/backends.md). Default: RALLYPOINT_BACKEND, or else
            "rallypoint".
        init_method: ``env://`` (the default): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as set
            by `rallypoint run` and torchrun, or else what mpirun, srun or flux run provide
            (docs/guides/mpi.md); or ``tcp://host:port``; or ``file:///path``.
        timeout: how long an operation waits for a peer; 30 minutes unless given.
        world_size, rank: instead of those in the environment; required for ``tcp://``, ``file://``
            and `store`.
        store: an open store that all ranks share, instead of `init_method`.
        group_name: keeps this group apart from groups of other names at the same store.
        pg_options: accepted for compatibility with torch and ignored.
        device_id: the number of this process's device, or a torch.device, for backends that use
            device memory; LOCAL_RANK's device unless given.
        algorithm: for every collective that has it, also in groups created later: a name from
            docs/algorithms.md, or a file with your own (docs/guides/custom-algorithms.md). Default:
            RALLYPOINT_ALGORITHM.
        links: a link model, by name or as a TOML file: algorithms are chosen by the times that it
            predicts. Default: RALLYPOINT_LINKS. For `algorithm` and `links`, rank 0's values apply
            to all.

    A process that was forked from a member may form its own groups, but cannot use the parent's.

    Raises:
        AlreadyInitializedError: there is already a default group.
        InvalidArgumentError: an argument or environment variable has an impossible value.
        StoreConnectionError: the store cannot be reached.
        StoreTimeoutError, CollectiveTimeoutError: some ranks did not join; the message names them.
        PeerLostError: a rank died while the group was forming.
        HostError: a backend's library or a device is missing (the message says how to get it);
            ranks on different machines cannot connect; backend="shm" and the ranks are on several
            machines; or the program that started this one offers no way to find the others.
    """
    default = GroupMember.WORLD
    if default is not None and default.status is not GroupStatus.INHERITED:
        raise AlreadyInitializedError(
            "the default process group is already initialized; call destroy_process_group first"
        )
    await_place()
    request = WorldRequest(
        backend=backend,
        init_method=init_method,
        timeout=timeout,
        world_size=world_size,
        rank=rank,
        store=store,
        algorithm=algorithm,
        links=links,
        device_id=device_id,
    )
    formed = None
    try:
        formed = _open_in_newest_round(request, group_name)
        set_default(formed)
    except BaseException:  # also an interrupt that came after the others had their group
        set_default(default)
        if formed is not None:
            formed.world.destroy()
        raise


def _open_in_newest_round(request: WorldRequest, name: str) -> ProcessGroup:
    while True:
        try:
            return open_world(request, f"{base_of_round()}{name}")
        except SystemCallError:
            raise  # it would be refused in the next round, too
        except (PeerError, HostError) as error:
            if request.store is not None or not take_next_place(error):
                raise


def form_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: object = None,
    *,
    algorithm: str | None = None,
    links: str | None = None,
) -> ProcessGroup:
    """Form a group beside the default one, also with processes that other launchers started.

    A trainer can use it to send new weights to workers that serve the model, which are jobs of
    their own:

        group = dist.form_process_group(
            init_method="tcp://trainer:29600", world_size=3, rank=0, group_name="weights"
        )
        dist.broadcast(weights, src=0, group=group)

    Its ranks are 0 to `world_size` - 1, independent of each process's rank in its own job; `src`
    and `dst` mean these ranks. The group has its own store, and anyone who can connect to it can
    join, so use a network that you trust. `destroy_process_group(group)` leaves the group.

    Args:
        init_method: ``tcp://HOST:PORT``, an address of rank 0's host, or ``file:///PATH`` on a file
            system that all share; or pass a `store`.
        group_name: the same for all members, and different from other groups at the same store.
        backend, timeout, world_size, rank, store, pg_options, device_id, algorithm, links: as in
            init_process_group.

    Raises:
        InvalidArgumentError: an argument or environment variable has an impossible value.
        StoreConnectionError: the store cannot be reached.
        StoreTimeoutError, CollectiveTimeoutError: some ranks did not join; the message names them.
        PeerLostError: a rank died while the group was forming.
        HostError: a backend's library or a device is missing, or ranks cannot connect.
    """
    if store is None and init_method in (None, "env://"):
        raise InvalidArgumentError(
            "form_process_group needs init_method='tcp://HOST:PORT' or 'file:///PATH', or a store: "
            "the environment describes only this job's own ranks"
        )
    request = WorldRequest(
        backend=backend,
        init_method=init_method,
        timeout=timeout,
        world_size=world_size,
        rank=rank,
        store=store,
        algorithm=algorithm,
        links=links,
        device_id=device_id,
    )
    return open_world(request, f"rallypoint/formed/{group_name}", name=group_name or "formed")


def destroy_process_group(group: Group = None) -> None:
    """Leave a group, or the default group and those created from it, and free their memory.

    Peers that still wait for this rank get an error. After the default group was destroyed,
    init_process_group can form a new one.

    Raises:
        NotInitializedError: there is no default group.
    """
    if group == NON_GROUP_MEMBER:
        return
    chosen = resolve(group)
    if chosen is GroupMember.WORLD:
        set_default(None)
    leave(chosen)
