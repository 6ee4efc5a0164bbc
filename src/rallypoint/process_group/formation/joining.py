"""Joins groups, forms them again with other members, and leaves them, at the latest at exit.

The engine, other libraries or both serve a group's calls. A group whose library only takes device
memory also has an engine, for Python objects.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.engine import engine_work as _work  # noqa: F401 - see leave_at_exit
from rallypoint.engine.communicator import Communicator
from rallypoint.engine.interruption import beside_handlers
from rallypoint.process_group.delegated.backends import ENGINES, parse_backend
from rallypoint.process_group.formation.connecting import GroupRequest, form_communicator
from rallypoint.process_group.groups.group import ProcessGroup, World
from rallypoint.process_group.planning import Algorithms
from rallypoint.store.init_method import JoinedStore

if TYPE_CHECKING:
    from rallypoint.process_group.delegated.library_group import LibraryGroup

_CPU = "cpu"


class GroupServices(Record):
    """What serves a group's calls, and the request by which it was formed.

    The communicator is None if the group does not use the engine.
    """

    request: GroupRequest
    communicator: Communicator | None
    algorithms: Algorithms
    takes_arrays: bool = True  # whether the engine serves arrays, and not only objects
    # Other libraries, by the kind of device whose memory they take.
    ends: Mapping[str, LibraryGroup] = MappingProxyType({})

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
        of_engine = request.__replace__(backend=engine)
        communicator, algorithms = beside_handlers(lambda: form_communicator(of_engine))
    else:
        request.await_members(request.prefix)
    ends: dict[str, LibraryGroup] = {}
    try:
        if others:
            from rallypoint.process_group.formation.joining_libraries import join_libraries

            ends = join_libraries(others, request)
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
    world = World(
        opened.store,
        prefix,
        services.algorithms.options,
        on_destroy or (old.on_destroy if is_same_store else None),
        device=old.device,
        title=old.title,
        is_across_jobs=old.is_across_jobs,
    )
    world.group, old.group = group, None
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
