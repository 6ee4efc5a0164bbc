"""Joins groups, forms them again with other members, and leaves them, at the latest at exit.

The engine, other libraries or both serve a group's calls. A group whose library only takes device
memory also has an engine, for Python objects.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from rallypoint.base.errors import HostError, InvalidArgumentError, PeerLostError, RallypointError
from rallypoint.base.wording import brief
from rallypoint.cluster.network import host_identity
from rallypoint.engine import engine_work as _work  # noqa: F401 - see leave_at_exit
from rallypoint.engine.communicator import Communicator
from rallypoint.engine.interruption import beside_handlers
from rallypoint.process_group.delegated.backends import ENGINES, connect, parse_backend, why_absent
from rallypoint.process_group.delegated.delegate import Delegate, LibraryMember
from rallypoint.process_group.delegated.library_group import LibraryGroup
from rallypoint.process_group.formation.connecting import GroupRequest, form_communicator
from rallypoint.process_group.formation.host_network import network_of
from rallypoint.process_group.groups.call_errors import found_while_forming
from rallypoint.process_group.groups.group import ProcessGroup, World
from rallypoint.process_group.planning import Algorithms
from rallypoint.store.init_method import JoinedStore, Presence
from rallypoint.store.prefix import PrefixStore

_LOOPBACK = "127.0.0.1"
_CPU = "cpu"


def _join_libraries(backends: Iterable[str], request: GroupRequest) -> dict[str, LibraryGroup]:
    """This member's groups at other libraries, by kind of device.

    Members find each other through the store, and the library connects them in its own way. Each
    member's key stays there while it is in the group, so that others can see which member died.
    """
    ends: dict[str, LibraryGroup] = {}
    store, rank, members = request.store, request.rank, request.members
    for name in backends:
        prefix = f"{request.prefix}/{name}"
        store.set(f"{prefix}/told/{rank}", json.dumps([host_identity(), why_absent(name)]))
        request.await_members(prefix)
        reports = store.multi_get([f"{prefix}/told/{peer}" for peer in range(len(members))])
        hosts, lacking = zip(*map(json.loads, reports), strict=True)
        _check_all_have(name, members, lacking)
        member = LibraryMember(
            name=name,
            store=PrefixStore(f"{prefix}/library", store),
            prefix=prefix,
            rank=rank,
            ranks=members,
            timeout=request.timeout,
            address=_LOOPBACK if len(set(hosts)) == 1 else network_of(store, name).address,
            device=request.device,
            title=request.name,
            environ=os.environ,
        )
        delegate = _connected(member, Presence(store, prefix, members))
        ends[delegate.device] = LibraryGroup(
            delegate,
            store,
            prefix,
            rank=rank,
            ranks=members,
            timeout_s=request.timeout.total_seconds(),
            title=request.name,
        )
    return ends


def _check_all_have(name: str, members: Sequence[int], lacking: Sequence[str]) -> None:
    """If one rank lacks a library, all raise, so that none waits for it."""
    lacks = {rank: why for rank, why in zip(members, lacking, strict=True) if why}
    if lacks:
        rank, why = next(iter(lacks.items()))
        who = "" if len(lacks) == len(members) else f" on rank {rank}"
        raise HostError(f"backend={name!r} is not available{who}: {why}")


def _connected(member: LibraryMember, presence: Presence) -> Delegate:
    started = time.monotonic()
    try:
        return connect(member)
    except RallypointError:
        raise
    except Exception as error:  # of the library's
        said = str(error).strip().partition("\n")[0]
        failed: HostError | PeerLostError = HostError(
            f"{member.name} could not connect rank {member.ranks[member.rank]} to the others "
            f"after {brief(time.monotonic() - started)}: {said}"
        )
        raise found_while_forming(presence, failed, is_last_to_leave=False) from error


@dataclass(frozen=True, slots=True)
class GroupServices:
    """What serves a group's calls, and the request by which it was formed.

    The communicator is None if the group does not use the engine.
    """

    request: GroupRequest
    communicator: Communicator | None
    algorithms: Algorithms
    takes_arrays: bool = True  # whether the engine serves arrays, and not only objects
    # Other libraries, by the kind of device whose memory they take.
    ends: Mapping[str, LibraryGroup] = field(default_factory=dict)

    def new_group(self, world: World, *, name: str, description: str) -> ProcessGroup:
        """A group that they serve, which is left at exit."""
        group = ProcessGroup(
            self.communicator,
            self.algorithms,
            rank=self.request.rank,
            world=world,
            prefix=self.request.prefix,
            ranks=self.request.members,
            group_name=name,
            group_desc=description,
            backend=self.request.backend,
            timeout=self.request.timeout,
            ends=self.ends,
            takes_arrays=self.takes_arrays,
        )
        leave_at_exit(group)
        return group

    def serve(self, group: ProcessGroup, world: World) -> None:
        """Have an existing group be served by these from now on."""
        group.enter(
            self.communicator,
            self.algorithms,
            rank=self.request.rank,
            world=world,
            prefix=self.request.prefix,
            ranks=self.request.members,
            ends=self.ends,
            takes_arrays=self.takes_arrays,
        )


def check_backend(backend: str) -> str:
    """A backend as get_backend() returns it: in lower case, without redundant parts."""
    parts = parse_backend(backend)
    if list(parts) == [_CPU]:
        return parts[_CPU]
    return str(backend).lower()


def has_engine(backend: str) -> bool:
    """Whether the engine serves the arrays of groups of this backend."""
    return parse_backend(backend).get(_CPU) in ENGINES


def begin_early(backend: str) -> None:
    """Before ranks connect, initialize MPI if it serves them.

    Open MPI was seen to hang at its end if PMIx had been used before its initialization.
    """
    if "mpi" in parse_backend(backend).values():
        from rallypoint.process_group.delegated import mpi_library  # most programs never need it

        mpi_library.initialize()  # what is missing is reported once all ranks are there


def join(request: GroupRequest) -> GroupServices:
    """Form a group; returns what then serves its calls."""
    backends = parse_backend(request.backend)
    engine = backends.get(_CPU, ENGINES[0])
    others = [each for each in backends.values() if each not in ENGINES]
    communicator, algorithms = None, Algorithms(request.options)
    if engine in ENGINES:
        of_engine = replace(request, backend=engine)
        communicator, algorithms = beside_handlers(lambda: form_communicator(of_engine))
    else:
        request.await_members(request.prefix)
    try:
        ends = _join_libraries(others, request)
    except BaseException:
        if communicator is not None:
            communicator.leave()
        raise
    if communicator is None:
        request.report_formed()
    return GroupServices(request, communicator, algorithms, has_engine(request.backend), ends)


def reform_world(
    group: ProcessGroup,
    opened: JoinedStore,
    prefix: str,
    *,
    timeout: timedelta,
    connect_timeout: timedelta | None = None,
    on_destroy: Callable[[], None] | None = None,
) -> None:
    """Give a default group a new communicator, with own rank, size and ranks as at this store.

        1. withdraw   calls under way end, later ones raise RevokedError; subgroups are left
        2. join       ranks that join under the new prefix form a communicator, as for a new group
        3. enter      the object takes it over, with its ranks

    A communicator is never repaired: what a rank of the old one still writes or sends goes to
    memory and connections that no rank reads any more. The caller decides which ranks join, and
    when.

    All processes that share the store call it; for a process that has no group yet,
    opening.form_world with the same prefix is the counterpart. No other thread may begin a call on
    the group meanwhile. If this fails, calls on the group continue raising RevokedError, and it may
    be called again.

    Args:
        opened: the store of the new round, which may be that of the old one.
        prefix: the beginning of the round's keys; no other round has used it.
        timeout, connect_timeout: how long forming may take, as in GroupRequest; the timeout of
            calls stays as it is.
        on_destroy: closes the store when the group is left; None: as the old one if it is the same,
            else the caller closes it.
    """
    if not group.is_world:
        raise InvalidArgumentError("only a default group can be formed again")
    if not group.is_revoked:
        group.check_member()
    old = group.world
    old.withdraw()
    is_same_store = opened.store is old.store
    if not is_same_store:
        old.release_store()
    services = join(
        GroupRequest(
            store=opened.store,
            prefix=prefix,
            rank=opened.rank,
            members=range(opened.world_size),
            timeout=timeout,
            options=old.options,
            backend=group.backend,
            device=old.device,
            name=old.title,
            is_across_jobs=old.is_across_jobs,
            connect_timeout=connect_timeout,
        )
    )
    world = replace(
        old,
        store=opened.store,
        prefix=prefix,
        options=services.algorithms.options,
        on_destroy=on_destroy or (old.on_destroy if is_same_store else None),
        subgroups=[],
        made=Counter(),
        has_met=False,
    )
    old.group = None
    services.serve(group, world)
    group.set_timeout(group.timeout)


_leaving_at_exit = weakref.WeakSet[ProcessGroup]()


def leave(group: ProcessGroup) -> None:
    """Leave a group; with a default group, also those created from it."""
    world = group.world
    if group.is_world:
        world.destroy()
    else:
        group.destroy()
        world.subgroups[:] = [each for each in world.subgroups if each is not group]


def leave_at_exit(group: ProcessGroup) -> None:
    """Leave at exit, so that a rank that just ends does not look like one that died.

    Exit handlers run in reverse order of import: engine.engine_work, imported above for this
    reason, then runs the callbacks of operations that leaving has ended.
    """
    try:
        if not _leaving_at_exit:
            atexit.register(_leave_all)
        _leaving_at_exit.add(group)
    except BaseException:  # an interrupt: no other code holds it yet that would leave it
        group.destroy()
        raise


def _leave_all() -> None:
    for group in list(_leaving_at_exit):
        leave(group)


def _abandon_all() -> None:
    for group in list(_leaving_at_exit):
        group.abandon()


os.register_at_fork(after_in_child=_abandon_all)
