"""Opens a world: finds its store, and forms the group of all processes that share it, mostly the
default one.

`store.init_method` finds the store and waits there, and `joining` connects what serves its calls.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from rallypoint.base.errors import (
    AlreadyInitializedError,
    HostError,
    InvalidArgumentError,
    PeerError,
    StoreConnectionError,
    StoreTimeoutError,
    SystemCallError,
)
from rallypoint.base.record import Record
from rallypoint.base.worker_env import is_env_given
from rallypoint.process_group import DEFAULT_GROUP
from rallypoint.process_group.formation.connecting import GroupRequest
from rallypoint.process_group.formation.joining import (
    begin_early,
    check_backend,
    has_engine,
    join,
    leave,
)
from rallypoint.process_group.formation.own_place import (
    CONNECT,
    ROUND,
    await_place,
    connect_timeout,
    existing_link,
    is_superseded,
    take_next_place,
)
from rallypoint.process_group.groups.default import (
    Group,
    GroupMember,
    check_timeout,
    default_pg_timeout,
    resolve,
    set_default,
)
from rallypoint.process_group.groups.group import NON_GROUP_MEMBER, GroupStatus, ProcessGroup, World
from rallypoint.process_group.planning import AlgorithmOptions
from rallypoint.schedule.choose import check_override
from rallypoint.store.init_method import JoinedStore, open_store, say_here, shows_deaths, to_stderr
from rallypoint.store.store import EphemeralStore, Store

_PAUSE_S = 0.02  # a server takes at least this long to end
_MOST_S = 5.0  # rank 0 waits until all have read what its store has for them
_ENDING_S = 2.0  # for a process that has just ended, until the server has taken note of it
_opened: dict[str, int] = {}  # by base: the number of the world that this process opened last


class MeetingPoint(Record, kw_only=True):
    """A default group that forms at a store: a world.

    latest     the number of the world that was opened last, from 1 on, and of the one before
        N/0        exists while rank 0 of that world does (init_method.say_here)
        N/all      set when it is known whether all have joined: no rank joins any more
        N/next     the number of the world that rank 0 opened after it; deleted when that has formed
        process/R  the process that has rank R, as long as its connection to the store lasts

    When all have formed a world, N/0 and N/all are deleted too (connecting.py); no rank joins that
    world either. So nothing of an earlier group is mistaken for this one's, and a process that
    replaces a dead one finds the world of the survivors, however many worlds each has been in.

    """

    place: JoinedStore
    prefix: str  # the beginning of the world's keys
    key_to_here: str  # led its ranks to it, and is not needed once it has formed
    process: int  # that opened the store here

    @property
    def key_when_formed(self) -> str:
        """The key to set once all have formed the world; empty if no process waits for it."""
        return f"{self.prefix}/formed/all" if self.place.is_rank_0s else ""

    def close(self) -> None:
        """Close the store; one that rank 0 runs serves the others until all have formed."""
        place = self.place
        if place.is_rank_0s and place.rank == 0 and os.getpid() == self.process:
            with suppress(StoreTimeoutError, StoreConnectionError):  # some rank has died
                place.store.wait([self.key_when_formed], timedelta(seconds=_MOST_S))
        place.store.close()


def meet(
    open_place: Callable[[], JoinedStore], base: str, timeout: timedelta, *, is_first: bool = False
) -> MeetingPoint:
    """Open the store, and find the world that is forming there.

    A store that rank 0 runs may belong to its previous group, and end with that: then it is opened
    again. `base` is the beginning of the keys of all worlds. If the world `is_first` among those,
    the store need not be asked.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        place = open_place()
        try:
            _take_rank(place, base, is_taken=is_first)
            if not is_first:
                return find_world(place, base, deadline)
            return _open_world(place, base, 0) if place.rank == 0 else _world(place, base, 1, 0)
        except StoreConnectionError:
            place.store.close()
            if not place.is_rank_0s or time.monotonic() + _PAUSE_S > deadline:
                raise
            time.sleep(_PAUSE_S)
        except BaseException:
            place.store.close()
            raise


def _take_rank(place: JoinedStore, base: str, *, is_taken: bool) -> None:
    """Write that this process has its rank; warn if another process has it.

    It may join anyway: children of all ranks can form their own group. If the rank
    `is_taken`, by this process, no one else has it.
    """
    if not isinstance(place.store, EphemeralStore) or not shows_deaths(place.store):
        return
    key, me = f"{base}/process/{place.rank}", f"{os.getpid()} on {os.uname().nodename}"
    until = time.monotonic() + _ENDING_S
    while (
        not is_taken
        and (holder := place.store.compare_set(key, me, me).decode(errors="replace")) != me
    ):
        if time.monotonic() > until:
            to_stderr(
                f"rank {place.rank} of this job is process {holder}, which is in its group, and"
                " this one waits for a group of others; if it has only inherited RANK, unset that,"
                " or give it a rank of its own"
            )
            return
        time.sleep(_PAUSE_S)
    place.store.set_ephemeral(key, me)


def find_world(place: JoinedStore, base: str, deadline: float) -> MeetingPoint:
    """The world that is forming at an open store."""
    store, latest = place.store, f"{base}/latest"
    number, before = map(int, store.get(latest).split()) if store.check([latest]) else (0, 0)
    if place.rank == 0:
        return _open_world(place, base, number)
    is_over = number == 0 or store.check([f"{base}/{number}/all"])
    if is_over or not store.check([f"{base}/{number}/0"]):
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"{base}/{number}/next"], timedelta(seconds=left_s))
        except StoreTimeoutError as error:
            raise StoreTimeoutError(
                f"rank {place.rank} waited {left_s:.0f} s for rank 0 to join; look for its first "
                "error",
                endpoint=error.endpoint,
                operation="init_process_group",
                key=base,
            ) from None
        before, number = number, int(store.get(f"{base}/{number}/next"))
    return _world(place, base, number, before)


def _open_world(place: JoinedStore, base: str, last: int) -> MeetingPoint:
    """On rank 0, after the world with the number `last`."""
    # This process's worlds of one base differ at any store.
    number = _opened[base] = max(last, _opened.get(base, 0)) + 1
    say_here(place.store, f"{base}/{number}/0")
    keys = [f"{base}/{last}/next", f"{base}/latest"]
    place.store.multi_set(keys, [str(number), f"{number} {last}"])
    return _world(place, base, number, last)


def _world(place: JoinedStore, base: str, number: int, before: int) -> MeetingPoint:
    key = f"{base}/{before}/next"
    prefix = f"{base}/{number}"
    return MeetingPoint(place=place, prefix=prefix, key_to_here=key, process=os.getpid())


_BACKEND = "RALLYPOINT_BACKEND"
_ATTEMPT_S = 0.2  # the first, to connect to a store that may have ended


class WorldRequest(Record, kw_only=True):
    """The arguments of init_process_group; see there."""

    backend: str | None
    init_method: str | None
    timeout: timedelta | None
    world_size: int
    rank: int
    store: Store | None
    algorithm: str | None
    links: str | None
    device_id: object


def open_world(request: WorldRequest, base: str, *, name: str = "") -> ProcessGroup:
    """Find the store, and form the group of all processes that share it.

    Args:
        base: the beginning of the keys of all worlds that are formed one after the other.
        name: of a group of processes of several jobs; empty for this job's default group.
    """
    backend = check_backend(request.backend or os.environ.get(_BACKEND) or "rallypoint")
    wait = check_timeout(request.timeout, default_pg_timeout)
    options = _options(request.algorithm, request.links)
    if request.algorithm is not None and not has_engine(backend):
        raise InvalidArgumentError(
            f"{backend} chooses its algorithms itself; algorithm={request.algorithm!r} is for "
            "backend='rallypoint'"
        )
    begin_early(backend)
    if request.store is not None:
        rank, world_size = request.rank, request.world_size
        _check_own_store(request.init_method, rank, world_size)
        place = JoinedStore(store=request.store, rank=rank, world_size=world_size)
        found = find_world(place, base, time.monotonic() + wait.total_seconds())
    else:
        try:
            found = meet(lambda: _open_place(request, wait), base, wait)
        except StoreConnectionError as error:
            from rallypoint.process_group.formation.host_network import raise_with_finding

            raise_with_finding(error)
    try:
        return form_world(
            GroupRequest(
                store=found.place.store,
                prefix=found.prefix,
                rank=found.place.rank,
                members=range(found.place.world_size),
                timeout=wait,
                options=options,
                backend=backend,
                device=request.device_id,
                name=f"group {name}" if name else DEFAULT_GROUP,
                key_to_here=found.key_to_here,
                key_when_formed=found.key_when_formed,
                is_across_jobs=bool(name),
                connect_timeout=connect_timeout(),
            ),
            group_name=name,
            on_destroy=found.close if request.store is None else None,
        )
    except BaseException:
        if request.store is None:
            found.place.store.close()
        raise


def base_of_round() -> str:
    """The beginning of the keys of the default groups of this process's round."""
    return f"rallypoint/{os.environ.get(ROUND, '0')}/"


def open_round(timeout: timedelta, watch: Callable[[Store], None]) -> MeetingPoint:
    """Find the store of the round that the environment names; `watch` is called with each one.

    This process has formed no group in that round yet.
    """

    def open_place() -> JoinedStore:
        place = _connected(
            lambda wait: open_store(timeout=wait, environ=os.environ), timeout, CONNECT
        )
        watch(place.store)
        return place

    return meet(open_place, base_of_round(), timeout, is_first=True)


def _open_place(request: WorldRequest, timeout: timedelta) -> JoinedStore:
    rank, world_size = request.rank, request.world_size
    if request.init_method in (None, "env://") and _may_be_of_others(rank, world_size):
        from rallypoint.cluster.pmi.meeting import open_launched

        found = open_launched(os.environ, rank=rank, world_size=world_size, timeout=timeout)
        if found is not None:
            return found

    def open_place(wait: timedelta) -> JoinedStore:
        return open_store(
            request.init_method, rank=rank, world_size=world_size, timeout=wait, environ=os.environ
        )

    return _connected(open_place, timeout, connect_timeout())


def _may_be_of_others(rank: int, world_size: int) -> bool:
    """Whether a launcher without RANK may have started this; `meeting` sets that for PyTorch."""
    is_given = is_env_given(os.environ, rank=rank, world_size=world_size)
    return not is_given or "rallypoint.cluster.pmi.meeting" in sys.modules


def _connected(
    open_place: Callable[[timedelta], JoinedStore],
    timeout: timedelta,
    connect_timeout: timedelta | None,
) -> JoinedStore:
    """Open a store, whose server may end meanwhile because a newer round begins."""
    if existing_link() is None:
        return open_place(timeout)
    limit_s = min(timeout, connect_timeout or timeout).total_seconds()
    until, attempt_s = time.monotonic() + limit_s, _ATTEMPT_S
    while True:
        left_s = until - time.monotonic()
        try:
            place = open_place(timedelta(seconds=max(min(attempt_s, left_s), 0.001)))
        except StoreConnectionError:
            if left_s <= attempt_s or is_superseded():
                raise
            attempt_s *= 2
        else:
            place.store.set_timeout(timeout)
            return place


def _options(algorithm: str | None, links: str | None) -> AlgorithmOptions:
    """This rank's options, checked as far as possible before the ranks connect."""
    override = os.environ.get("RALLYPOINT_ALGORITHM", "") if algorithm is None else algorithm
    check_override(override)
    name = os.environ.get("RALLYPOINT_LINKS", "") if links is None else links
    if not name:
        return AlgorithmOptions(override)
    from rallypoint.schedule.cost.links import parse_model, read_model_text  # few jobs name one

    text = read_model_text(name)
    parse_model(text)
    return AlgorithmOptions(override, text)


def form_world(
    request: GroupRequest, *, group_name: str = "", on_destroy: Callable[[], None] | None = None
) -> ProcessGroup:
    """Form a default group, or with a `group_name`, one of processes of several jobs."""
    services = join(request)
    world = World(
        request.store,
        request.prefix,
        services.algorithms.options,
        on_destroy,
        device=request.device,
        title=request.name,
        is_across_jobs=request.is_across_jobs,
    )
    description = "undefined" if group_name else "default_pg"
    world.group = group = services.new_group(world, name=group_name, description=description)
    return group


def _check_own_store(init_method: str | None, rank: int, world_size: int) -> None:
    if init_method is not None:
        raise InvalidArgumentError("give init_method or store, not both")
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(
            f"store= needs rank and world_size, with rank below world_size; they are {rank} and "
            f"{world_size}"
        )


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
