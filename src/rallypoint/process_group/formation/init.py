"""Forms and dissolves the default process group, and groups beside it.

How a group comes to be is `opening`; which of them is the default one is decided here.
"""

from __future__ import annotations

import os
from datetime import timedelta

from rallypoint.base.errors import AlreadyInitializedError, InvalidArgumentError
from rallypoint.process_group.formation.opening import WorldRequest, open_world
from rallypoint.process_group.groups.default import Group, GroupMember, resolve, set_default
from rallypoint.process_group.groups.group import NON_GROUP_MEMBER, ProcessGroup
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

    While it waits, the lowest rank that is there says every 10 s which ranks are missing.

    Args:
        backend: "rallypoint": shared memory within a machine and TCP between machines; "shm":
            shared memory, one machine; "tcp": TCP between any two ranks; or another library's:
            "gloo", "nccl", "hccl", "mpi", or one for each kind of device, as in
            "cpu:gloo,cuda:nccl" (docs/guides/backends.md). RALLYPOINT_BACKEND unless given, or else
            "rallypoint".
        init_method: ``env://`` (the default): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
            `rallypoint run` and torchrun set them, or else what mpirun, srun or flux run says
            (docs/guides/mpi.md); or ``tcp://host:port``; or ``file:///path``.
        timeout: how long an operation may wait for a peer; 30 minutes unless given.
        world_size, rank: instead of the environment's; needed for ``tcp://``, ``file://``, `store`.
        store: an open store that all ranks share, instead of an `init_method`.
        group_name: kept apart from groups of other names at the same store.
        pg_options: accepted for torch's sake; it says nothing here.
        device_id: the number of this process's device, or a torch.device, where the backend takes
            memory of one; the one that LOCAL_RANK says unless given.
        algorithm: for every collective that has it, and for the groups made later: a name of
            docs/algorithms.md, or a file of one's own (docs/guides/custom-algorithms.md).
            RALLYPOINT_ALGORITHM unless given.
        links: a link model, by name or as a TOML file: algorithms are chosen by the times that it
            predicts. RALLYPOINT_LINKS unless given. Of both, what rank 0 says counts for all.

    A process that was forked off a member may form groups of its own, and has no part in those.

    Raises:
        AlreadyInitializedError: there is a default group already.
        InvalidArgumentError: an impossible argument or environment variable.
        StoreConnectionError: the store cannot be reached.
        StoreTimeoutError, CollectiveTimeoutError: some ranks did not come; the message names them.
        HostError: a backend's library, or a device, is missing, and how to get it; ranks on
            different machines cannot connect; or, for "shm", there are such; or
            whatever started this program offers no way to find the others.
    """
    default = GroupMember.WORLD
    if default is not None and not default.is_parents:
        raise AlreadyInitializedError(
            "the default process group is already initialized; call destroy_process_group first"
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
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    formed = None
    try:
        formed = open_world(request, f"rallypoint/{attempt}/{group_name}")
        set_default(formed)
    except BaseException:  # also an interrupt that came after the others had their group
        set_default(default)
        if formed is not None:
            formed.world.destroy()
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

    A trainer can so send new weights to workers that serve the model, each in a job of its own:

        group = dist.form_process_group(
            init_method="tcp://trainer:29600", world_size=3, rank=0, group_name="weights"
        )
        dist.broadcast(weights, src=0, group=group)

    Its ranks are 0 to `world_size` - 1, whatever each process is called in its own job, and mean
    the same in `src` and `dst`. It has a store of its own, at which whoever reaches it may take
    part: choose a network that you trust. `destroy_process_group(group)` leaves it.

    Args:
        init_method: ``tcp://HOST:PORT``, where rank 0 is, or ``file:///PATH`` on a file system that
            all share; or a `store`.
        group_name: the same for all, and not that of another group at the same store.

    The others are those of init_process_group, and so are the errors raised.
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
    """Leave a group, or the default one and those made of it, and give the memory back.

    Peers that still wait for this rank are told. After the default group's end a new one may be
    formed by init_process_group.

    Raises:
        NotInitializedError: there is no default group.
    """
    if group == NON_GROUP_MEMBER:
        return
    chosen = resolve(group)
    world = chosen.world
    if not chosen.is_world:
        chosen.destroy()
        world.subgroups[:] = [other for other in world.subgroups if other is not chosen]
        return
    if chosen is GroupMember.WORLD:
        set_default(None)
    world.destroy()
