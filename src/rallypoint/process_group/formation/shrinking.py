"""shrink_group: the remaining ranks of a group form a new one, also after a death.

The successor of a default group is a world of its own at the same store, with new rank numbers. The
successor of another group is formed by its ranks in the default group, which do not change.
"""

from __future__ import annotations

from typing import Final

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.process_group.formation.opening import form_world
from rallypoint.process_group.formation.subgroups import form_group
from rallypoint.process_group.groups.default import GroupMember, resolve, set_default
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.store.init_method import OpenStore

SHRINK_DEFAULT: Final = 0x00
SHRINK_ABORT: Final = 0x01  # torch.distributed's names and numbers


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: object = None,
) -> ProcessGroup:
    """Form a new group from a group's ranks without some of them, and leave the old one.

    The ranks that stay call it, all with the same arguments; the excluded ranks do not. It may
    follow a PeerLostError, whose `rank` is the one to exclude:

        try:
            dist.all_reduce(gradient)
        except dist.PeerLostError as error:
            dist.shrink_group([error.rank])
            dist.all_reduce(gradient)

    If it is the default group, the new group replaces it, its ranks are numbered from 0, and all
    groups created from the old one are left as well. The ranks meet at the old group's store, which
    must have survived: it does if `rallypoint run` or torchrun serves it.

    Args:
        ranks_to_exclude: ranks in the group, not global ones.
        group: the default group unless given.
        shrink_flags: SHRINK_ABORT: first end calls that still wait in the old group with an error.
        pg_options: accepted for compatibility with torch and ignored.

    Returns:
        The new group.

    Raises:
        InvalidTypeError: ranks_to_exclude is not a list of integers.
        InvalidArgumentError: ranks_to_exclude is empty, names a rank twice, all ranks, this rank,
            or a rank that is not in the group; or there is no such flag.
        NotInitializedError: there is no default group, or the group was left.
        StoreConnectionError: the store has ended.
        StoreTimeoutError, CollectiveTimeoutError, PeerLostError: some of the staying ranks did not
            join.
    """
    old = resolve(group)
    _check(ranks_to_exclude, old, shrink_flags)
    if old.is_destroyed:
        old.set_timeout(old.timeout)  # raises
    if shrink_flags == SHRINK_ABORT:
        for each in old.world.subgroups if old.is_world else ():
            each.abort()
        old.abort()
    kept = [rank for rank in range(old.size()) if rank not in ranks_to_exclude]
    return _next_world(old, kept) if old.is_world else _next_group(old, kept)


def _check(ranks: object, old: ProcessGroup, flags: int) -> None:
    if not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks):
        raise InvalidTypeError(f"ranks_to_exclude must be a list of integers, not {ranks!r}")
    if flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise InvalidArgumentError(f"shrink_flags={flags!r} is not SHRINK_DEFAULT or SHRINK_ABORT")
    if not ranks or len(set(ranks)) < len(ranks):
        raise InvalidArgumentError(
            f"ranks_to_exclude={ranks} must name at least one rank, and each only once"
        )
    if not all(0 <= rank < old.size() for rank in ranks):
        raise InvalidArgumentError(
            f"ranks_to_exclude={ranks}: the group's ranks are 0 to {old.size() - 1}"
        )
    if old.own_rank in ranks:
        raise InvalidArgumentError(
            f"ranks_to_exclude={ranks} names this rank, {old.own_rank}; only the ranks that stay "
            "call shrink_group"
        )


def _next_group(old: ProcessGroup, kept: list[int]) -> ProcessGroup:
    formed = form_group(
        old.world,
        [old.ranks[rank] for rank in kept],
        timeout=old.timeout,
        backend=old.backend,
        by_ranks=True,
        description=None if old.group_desc == "undefined" else old.group_desc,
        sort_ranks=False,
    )
    assert isinstance(formed, ProcessGroup)
    old.destroy()
    old.world.subgroups[:] = [other for other in old.world.subgroups if other is not old]
    return formed


def _nothing() -> None:
    """Keep the store open: it belongs to the old world until that is left."""


def _next_world(old: ProcessGroup, kept: list[int]) -> ProcessGroup:
    world = old.world
    formed = form_world(
        OpenStore(store=world.store, rank=kept.index(old.own_rank), world_size=len(kept)),
        f"{world.prefix}/kept {','.join(map(str, kept))}",
        timeout=old.timeout,
        backend=old.backend,
        options=world.options,
        device=world.device,
        on_destroy=_nothing,
        name=old.group_name,
    )
    if GroupMember.WORLD is old:
        set_default(formed)
    world.leave_to(formed.world)
    return formed
