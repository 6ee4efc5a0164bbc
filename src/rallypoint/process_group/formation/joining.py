"""Joins this process to a group, whatever serves its calls: the engine, other libraries, or both.

A group whose library only takes device memory also has an engine, for Python objects.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from rallypoint.base.errors import HostError, InvalidArgumentError, PeerLostError, RallypointError
from rallypoint.base.wording import brief
from rallypoint.cluster.interface import host_identity
from rallypoint.engine.communicator import Communicator
from rallypoint.engine.interruption import beside_handlers
from rallypoint.process_group import DEFAULT_GROUP
from rallypoint.process_group.delegated.backends import ENGINES, connect, parse_backend, why_absent
from rallypoint.process_group.delegated.delegate import Delegate, LibraryMember
from rallypoint.process_group.delegated.library_group import LibraryGroup
from rallypoint.process_group.formation.connecting import form_communicator, say_formed
from rallypoint.process_group.formation.host_network import network_of
from rallypoint.process_group.groups.accounts import found_while_forming
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.planning import AlgorithmOptions, Algorithms
from rallypoint.store.init_method import JoinedStore, Presence, await_ranks
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.store import Store

_LOOPBACK = "127.0.0.1"


def form_ends(
    backends: Iterable[str],
    store: Store,
    prefix: str,
    *,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    device: object,
    title: str,
) -> dict[str, LibraryGroup]:
    """This member's ends, by kind of device.

    They meet at the store, as those of the engine do, and the library connects them in its own way.
    Each member's key stays there while it is in the group, so that others can see which member
    died.

    Args:
        backends: the names of other backends.
        device: of this process; None: by LOCAL_RANK.
        title: the group's name for people.
    """
    ends: dict[str, LibraryGroup] = {}
    for name in backends:
        place = f"{prefix}/{name}"
        store.set(f"{place}/told/{rank}", json.dumps([host_identity(), why_absent(name)]))
        await_ranks(
            store, place, rank=rank, world_size=len(members), timeout=timeout, global_ranks=members
        )
        told = store.multi_get([f"{place}/told/{peer}" for peer in range(len(members))])
        hosts, lacking = zip(*map(json.loads, told), strict=True)
        _check_all_have(name, members, lacking)
        member = LibraryMember(
            name=name,
            store=PrefixStore(f"{place}/library", store),
            prefix=place,
            rank=rank,
            ranks=members,
            timeout=timeout,
            address=_LOOPBACK if len(set(hosts)) == 1 else network_of(store, name).address,
            device=device,
            title=title,
            environ=os.environ,
        )
        delegate = _connected(member, Presence(store, place, members))
        ends[delegate.device] = LibraryGroup(
            delegate,
            store,
            place,
            rank=rank,
            ranks=members,
            timeout_s=timeout.total_seconds(),
            title=title,
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


_CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Parts:
    """What serves a group's calls.

    Attributes:
        communicator: the engine's end; None if the group does not use the engine.
        takes_arrays: whether the engine serves the caller's arrays, and not only objects.
        ends: other libraries', by the kind of device whose memory they take.
    """

    communicator: Communicator | None
    algorithms: Algorithms
    takes_arrays: bool
    ends: dict[str, LibraryGroup]


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
    """Before ranks meet: initialize MPI, if it serves them, so that they meet through it.

    Open MPI was seen to hang at its end if PMIx had been used before its initialization.
    """
    if "mpi" in parse_backend(backend).values():
        from rallypoint.process_group.delegated import mpi_library  # most programs never need it

        mpi_library.initialize()  # what is missing is told once all ranks are there


def join(
    store: Store,
    prefix: str,
    *,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    backend: str,
    options: AlgorithmOptions,
    device: object = None,
    name: str = DEFAULT_GROUP,
    way: str = "",
    done: str = "",
    is_across_jobs: bool = False,
    connect_timeout: timedelta | None = None,
) -> Parts:
    """Form the group of `members` (global ranks); this process is the one at `rank`.

    Args:
        backend: as `check_backend` returns it.
        device: of this process, for libraries that take device memory; None: by LOCAL_RANK.
        name, way, done, is_across_jobs, connect_timeout: as in communicator.form_communicator.

    Raises as form_communicator and delegated.formation.form_ends.
    """
    backends = parse_backend(backend)
    engine = backends.get(_CPU, ENGINES[0])
    others = [each for each in backends.values() if each not in ENGINES]
    communicator, algorithms = None, Algorithms(options)
    if engine in ENGINES:
        communicator, algorithms = beside_handlers(
            lambda: form_communicator(
                store,
                prefix,
                rank=rank,
                members=members,
                timeout=timeout,
                options=options,
                backend=engine,
                name=name,
                way=way,
                done=done,
                is_across_jobs=is_across_jobs,
                connect_timeout=connect_timeout,
            )
        )
    else:
        await_ranks(
            store, prefix, rank=rank, world_size=len(members), timeout=timeout, global_ranks=members
        )
    ends = {}
    try:
        if others:
            ends = form_ends(
                others,
                store,
                prefix,
                rank=rank,
                members=members,
                timeout=timeout,
                device=device,
                title=name,
            )
    except BaseException:
        if communicator is not None:
            communicator.leave()
        raise
    if communicator is None:
        say_formed(store, prefix, len(members), [], way=way, done=done)
    return Parts(communicator, algorithms, has_engine(backend), ends)


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
        2. join       ranks that meet under the new prefix form a communicator, as for a new group
        3. enter      the object takes it over, with its ranks

    A communicator is never repaired: what a rank of the old one still writes or sends goes to
    memory and connections that no rank reads any more. The caller decides which ranks meet, and
    when.

    All who share the store call it; for a process that has no group yet, opening.form_world with
    the same prefix is the counterpart. No other thread may begin a call on the group meanwhile.

    If this fails, calls on the group go on raising RevokedError, and it may be called again.

    Args:
        opened: the store of the new round, which may be that of the old one.
        prefix: the beginning of the round's keys; no other round has used it.
        timeout: how long forming may take; that of calls stays as it is.
        connect_timeout: how much of that is left once all have come, for each hundred of them;
            None: the rest.
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
    members = range(opened.world_size)
    parts = join(
        opened.store,
        prefix,
        rank=opened.rank,
        members=members,
        timeout=timeout,
        backend=group.backend,
        options=old.options,
        device=old.device,
        name=old.title,
        is_across_jobs=old.is_across_jobs,
        connect_timeout=connect_timeout,
    )
    close = on_destroy or (old.on_destroy if is_same_store else _nothing)
    world = replace(
        old,
        store=opened.store,
        prefix=prefix,
        options=parts.algorithms.options,
        on_destroy=close,
        subgroups=[],
        made=Counter(),
        has_met=False,
    )
    old.group = None
    group.enter(
        parts.communicator,
        parts.algorithms,
        rank=opened.rank,
        world=world,
        prefix=prefix,
        ranks=members,
        ends=parts.ends,
        takes_arrays=parts.takes_arrays,
    )
    group.set_timeout(group.timeout)


def _nothing() -> None:
    """The caller's store is closed by the caller."""
