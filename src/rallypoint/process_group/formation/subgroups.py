"""Groups of some of the ranks: new_group and its relatives, as in torch.distributed.

Members agree on a group's name by counting, or by its ranks; only they use the store. A rank
that is not a member counts and returns, at no other cost.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.interruption import refuse_among_others
from rallypoint.process_group.formation.connecting import GroupRequest
from rallypoint.process_group.formation.joining import GroupServices, check_backend, join
from rallypoint.process_group.groups.default import check_timeout, get_process_group_ranks, resolve
from rallypoint.process_group.groups.group import NON_GROUP_MEMBER, ProcessGroup, World
from rallypoint.process_group.planning import Algorithms


def new_group(
    ranks: Iterable[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: object = None,
    sort_ranks: bool = True,
) -> ProcessGroup | int:
    """Form a group of some ranks; all ranks call it, for the same groups in the same order.

    Args:
        ranks: global ranks of the members; None for all.
        timeout: how long its operations wait for a peer; the default group's unless given.
        backend: one of init_process_group's; the default group's unless given.
        use_local_synchronization: only the members call it. The group is then identified by its
            ranks, and each member must form groups of the same ranks equally often.
        group_desc: a short description of the group.
        sort_ranks: number the members by their global ranks, not by their order in `ranks`.
        pg_options: accepted for compatibility with torch and ignored.
        device_id: as in init_process_group.

    Returns:
        The group, or GroupMember.NON_GROUP_MEMBER if this rank is not in it.

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: `ranks` are not ranks of the default group, or one appears twice.
        StoreConnectionError: the store cannot be reached.
        StoreTimeoutError, CollectiveTimeoutError: some members did not join; the message names
            them.
        PeerLostError: a member died while the group was forming.
        HostError: members on different machines cannot connect, or a backend's library is missing.
    """
    world = resolve(None).world
    return form_group(
        world,
        ranks,
        timeout=timeout,
        backend=backend,
        by_ranks=use_local_synchronization,
        description=group_desc,
        sort_ranks=sort_ranks,
        device=device_id,
    )


def form_group(
    world: World,
    ranks: Iterable[int] | None = None,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    by_ranks: bool = False,
    description: str | None = None,
    sort_ranks: bool = True,
    device: object = None,
    gone: Callable[[], Collection[int]] = tuple,
) -> ProcessGroup | int:
    """new_group within a given world; `gone` is that of GroupRequest."""
    refuse_among_others()  # before the group has a name, which others count
    whole = world.group
    assert whole is not None
    members = _checked(list(whole.ranks if ranks is None else ranks), whole, sort_ranks)
    chosen = check_backend(backend or whole.backend)
    wait = check_timeout(timeout, whole.timeout)
    name = _next_name(world, _by_ranks(members) if by_ranks else "all")
    if whole.own_rank not in members:
        return NON_GROUP_MEMBER
    title = f"group {description or name}"
    request = _request(world, name, members, timeout=wait, backend=chosen, title=title)
    services = join(request.__replace__(device=device, gone=gone))
    formed = services.new_group(world, name=name, description=description or "undefined")
    world.subgroups.append(formed)
    return formed


def _request(
    world: World, name: str, ranks: Sequence[int], *, timeout: timedelta, backend: str, title: str
) -> GroupRequest:
    """What forms a group of these global ranks, of which this rank is one."""
    assert world.group is not None
    return GroupRequest(
        store=world.store,
        prefix=f"{world.prefix}/{name}",
        rank=ranks.index(world.group.own_rank),
        members=ranks,
        timeout=timeout,
        options=world.options,
        backend=backend,
        device=world.device,
        name=title,
    )


def unformed_group(
    world: World, ranks: Sequence[int], own_rank: int, description: str
) -> ProcessGroup:
    """A group that serves no call until `reform_group` has given it members."""
    whole = world.group
    assert whole is not None
    request = GroupRequest(
        store=world.store,
        prefix="",
        rank=own_rank,
        members=ranks,
        timeout=whole.timeout,
        options=world.options,
        backend=whole.backend,
    )
    services = GroupServices(request, None, Algorithms(world.options))
    group = services.new_group(world, name=description, description=description)
    group.withdraw(f"the process group {description} has no members yet")
    return group


def reform_group(group: ProcessGroup, world: World, ranks: Sequence[int]) -> None:
    """Give a group members in the present round of its default group; only they call it."""
    name, title = _next_name(world, _by_ranks(ranks)), f"group {group.group_desc}"
    request = _request(
        world, name, ranks, timeout=group.timeout, backend=group.backend, title=title
    )
    join(request).serve(group, world)
    world.subgroups.append(group)


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | int | None, list[ProcessGroup | int]]:
    """Split a group into subgroups of `group_size` consecutive ranks; all ranks call it.

    `group_size` defaults to the number of ranks on each host (LOCAL_WORLD_SIZE).

    Returns:
        This rank's subgroup, and the list of all of them (NON_GROUP_MEMBER for those of other
        ranks).

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: the group's size is not a multiple of `group_size`.
        StoreTimeoutError, CollectiveTimeoutError: some members did not join; the message names
            them.
        PeerLostError: a member died while the group was forming.
    """
    ranks = get_process_group_ranks(group)
    if group_size is None:
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not text.isdecimal():
            raise InvalidArgumentError(
                "group_size must be given: LOCAL_WORLD_SIZE does not say how many ranks a host has"
            )
        group_size = int(text)
    if group_size <= 0:
        raise InvalidArgumentError(f"group_size={group_size} must be positive")
    if len(ranks) % group_size:
        raise InvalidArgumentError(
            f"the group has {len(ranks)} ranks, which is not divisible by group_size={group_size}"
        )
    parts = [ranks[first : first + group_size] for first in range(0, len(ranks), group_size)]
    return new_subgroups_by_enumeration(parts, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | int | None, list[ProcessGroup | int]]:
    """Form disjoint subgroups, each given by its global ranks; all ranks call it.

    Returns:
        This rank's subgroup or None, and the list of all of them (NON_GROUP_MEMBER for those of
        other ranks).

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: there are no subgroups, or a rank is in two of them.
        StoreTimeoutError, CollectiveTimeoutError: some members did not join; the message names
            them.
        PeerLostError: a member died while the group was forming.
    """
    _check_disjoint(ranks_per_subgroup_list, "ranks_per_subgroup_list")
    subgroups = [
        new_group(ranks, timeout, backend, pg_options, group_desc=group_desc)
        for ranks in ranks_per_subgroup_list
    ]
    own = [subgroup for subgroup in subgroups if subgroup != NON_GROUP_MEMBER]
    return (own[0] if own else None), subgroups


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Form subgroups of a group, given by their ranks *in that group*; all of its ranks call it.

    Returns:
        This rank's subgroup, or None if it is in none of them.

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: there are no subgroups, a rank is in two of them, or a rank is not in
            the group.
        StoreTimeoutError, CollectiveTimeoutError: some members did not join; the message names
            them.
        PeerLostError: a member died while the group was forming.
    """
    parent = resolve(parent_pg)
    _check_disjoint(split_ranks, "split_ranks")
    assert split_ranks is not None
    for rank in (rank for part in split_ranks for rank in part):
        if type(rank) is not int or not 0 <= rank < parent.size():
            raise InvalidArgumentError(
                f"split_ranks names rank {rank!r}, but the group's ranks are 0 to "
                f"{parent.size() - 1}"
            )
    for part in split_ranks:
        if parent.own_rank in part:
            formed = form_group(
                parent.world,
                [parent.ranks[rank] for rank in part],
                timeout=check_timeout(timeout, parent.timeout),
                backend=backend or parent.backend,
                by_ranks=True,
                description=group_desc,
                sort_ranks=False,
            )
            assert isinstance(formed, ProcessGroup)
            return formed
    return None


def _checked(ranks: list[int], whole: ProcessGroup, sort_ranks: bool) -> list[int]:
    for rank in ranks:
        whole.group_rank(rank, "ranks: rank")
    if not ranks or len(set(ranks)) < len(ranks):
        raise InvalidArgumentError(f"ranks={ranks} must name at least one rank, and each only once")
    return sorted(ranks) if sort_ranks else ranks


def _check_disjoint(parts: Sequence[Sequence[int]] | None, name: str) -> None:
    if not parts:
        raise InvalidArgumentError(f"{name} must hold at least one list of ranks")
    seen = set[int]()
    for part in parts:
        for rank in part:
            if rank in seen:
                raise InvalidArgumentError(f"{name}={list(parts)}: rank {rank} appears twice")
            seen.add(rank)


def _next_name(world: World, kind: str) -> str:
    name = f"{kind}/{world.made[kind]}"
    world.made[kind] += 1
    return name


def _by_ranks(members: Sequence[int]) -> str:
    listed = ",".join(map(str, members))
    return listed if len(listed) < 100 else hashlib.sha256(listed.encode()).hexdigest()
