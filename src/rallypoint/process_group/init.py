"""Forms and dissolves the default process group, and any other.

Which group is forming at a store is found by `worlds`. Finding the store and waiting there is
`store.init_method`; sharing memory `formation`.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

from rallypoint.base.errors import (
    AlreadyInitializedError,
    InvalidArgumentError,
    StoreConnectionError,
)
from rallypoint.cluster.meeting import open_launched
from rallypoint.engine import work as _work  # noqa: F401 - see leave_at_exit
from rallypoint.process_group.finding import raise_with_finding
from rallypoint.process_group.groups import (
    NON_GROUP_MEMBER,
    Group,
    GroupMember,
    ProcessGroup,
    World,
    resolve,
    set_default,
)
from rallypoint.process_group.joining import check_backend, has_engine, join
from rallypoint.process_group.planning import AlgorithmOptions
from rallypoint.process_group.worlds import closing, find_world, formed_key, meet
from rallypoint.schedule.choose import check_override
from rallypoint.schedule.links import parse_model, read_model_text
from rallypoint.store.init_method import OpenStore, open_store
from rallypoint.store.store import Store, seconds_of

_BACKEND = "RALLYPOINT_BACKEND"
DEFAULT_TIMEOUT = timedelta(minutes=30)

_leaving_at_exit = weakref.WeakSet[ProcessGroup]()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    *,
    algorithm: str | None = None,
    links: str | None = None,
    device_id: object = None,
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
        algorithm: for every collective that has it, and for the groups made later: a name of
            docs/algorithms.md, or a file of one's own (docs/guides/custom-algorithms.md).
            RALLYPOINT_ALGORITHM unless given.
        links: a link model, by name or as a TOML file: algorithms are chosen by the times that it
            predicts. RALLYPOINT_LINKS unless given. Of both, what rank 0 says counts for all.
        device_id: the number of this process's device, or a torch.device, where the backend takes
            memory of one; the one that LOCAL_RANK says unless given.

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
    name = check_backend(backend or os.environ.get(_BACKEND) or "rallypoint")
    wait = check_timeout(timeout, DEFAULT_TIMEOUT)
    options = _options(algorithm, links)
    if algorithm is not None and not has_engine(name):
        raise InvalidArgumentError(
            f"{name} chooses its algorithms itself; algorithm={algorithm!r} is for "
            "backend='rallypoint'"
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    base = f"rallypoint/{attempt}/{group_name}"
    close = _nothing
    if store is not None:
        _check_own_store(init_method, rank, world_size)
        place = OpenStore(store=store, rank=rank, world_size=world_size)
        found = find_world(place, base, time.monotonic() + wait.total_seconds())
    else:

        def open_place() -> OpenStore:
            if init_method in (None, "env://"):
                found = open_launched(os.environ, rank=rank, world_size=world_size, timeout=wait)
                if found is not None:
                    return found
            return open_store(
                init_method, rank=rank, world_size=world_size, timeout=wait, environ=os.environ
            )

        try:
            place, found = meet(open_place, base, wait)
        except StoreConnectionError as error:
            raise_with_finding(error)
        close = closing(place, found)
    formed = None
    try:
        formed = form_world(
            place,
            found.prefix,
            timeout=wait,
            backend=name,
            options=options,
            device=device_id,
            on_destroy=close,
            way=found.way,
            done=formed_key(place, found),
        )
        set_default(formed)
    except BaseException:  # also an interrupt that came after the others had their group
        set_default(default)
        if formed is not None:
            formed.destroy()
        if store is None:
            place.store.close()
        raise


def _options(algorithm: str | None, links: str | None) -> AlgorithmOptions:
    """What this rank was told, checked as far as it goes before the ranks meet."""
    override = os.environ.get("RALLYPOINT_ALGORITHM", "") if algorithm is None else algorithm
    check_override(override)
    name = os.environ.get("RALLYPOINT_LINKS", "") if links is None else links
    text = read_model_text(name) if name else ""
    if text:
        parse_model(text)
    return AlgorithmOptions(override, text)


def form_world(
    place: OpenStore,
    prefix: str,
    *,
    timeout: timedelta,
    backend: str,
    options: AlgorithmOptions,
    device: object = None,
    on_destroy: Callable[[], None],
    way: str = "",
    done: str = "",
) -> ProcessGroup:
    """Form a group of all who share a store, with keys that begin with `prefix`.

    The last one to be done deletes the key `way`, and sets `done`.
    """
    members = range(place.world_size)
    parts = join(
        place.store,
        prefix,
        rank=place.rank,
        members=members,
        timeout=timeout,
        backend=backend,
        options=options,
        device=device,
        way=way,
        done=done,
    )
    world = World(place.store, prefix, parts.algorithms.options, on_destroy)
    world.group = ProcessGroup(
        parts.communicator,
        parts.algorithms,
        rank=place.rank,
        ends=parts.ends,
        takes_arrays=parts.takes_arrays,
        world=world,
        prefix=prefix,
        ranks=members,
        group_name="",
        group_desc="default_pg",
        backend=backend,
        timeout=timeout,
    )
    leave_at_exit(world.group)
    return world.group


def leave_at_exit(group: ProcessGroup) -> None:
    """A rank that just ends must not look to the others like one that died.

    What was imported first is called last at exit: engine.work, which is imported above for that,
    then runs the callbacks of what leaving has ended.
    """
    try:
        if not _leaving_at_exit:
            atexit.register(_leave_all)
        _leaving_at_exit.add(group)
    except BaseException:  # an interrupt: nobody else holds it yet who would leave it
        group.destroy()
        raise


def _leave_all() -> None:
    for group in _leaving_at_exit:
        group.destroy()


def _abandon_all() -> None:
    for group in list(_leaving_at_exit):
        group.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def destroy_process_group(group: Group = None) -> None:
    """Leave a group, or the default one and all others, and give the memory back.

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
    set_default(None)
    world.destroy()


def check_timeout(timeout: timedelta | None, default: timedelta) -> timedelta:
    """A timeout, or the default for None.

    Raises:
        InvalidTypeError, InvalidArgumentError: no timedelta, or not positive.
    """
    if timeout is None:
        return default
    seconds_of(timeout)
    return timeout


def _nothing() -> None:
    """The store of the caller is the caller's to close."""


def _check_own_store(init_method: str | None, rank: int, world_size: int) -> None:
    if init_method is not None:
        raise InvalidArgumentError("give init_method or store, not both")
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(
            f"store= needs rank and world_size, with rank below world_size; they are {rank} and "
            f"{world_size}"
        )
