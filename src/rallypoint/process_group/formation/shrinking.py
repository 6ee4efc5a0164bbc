"""shrink_group: the remaining ranks of a group form a new one, also after a death.

The successor of a default group is a world of its own at the same store, with new rank numbers. The
successor of another group is formed by its ranks in the default group, which do not change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from rallypoint.base.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    PeerError,
    RallypointError,
    RevokedError,
)
from rallypoint.process_group.formation.connecting import GroupRequest
from rallypoint.process_group.formation.joining import leave
from rallypoint.process_group.formation.opening import form_world
from rallypoint.process_group.formation.subgroups import form_group
from rallypoint.process_group.groups.agreeing import decide
from rallypoint.process_group.groups.default import GroupMember, resolve, set_default
from rallypoint.process_group.groups.group import ProcessGroup, survivors_of

SHRINK_DEFAULT: Final = 0x00
SHRINK_ABORT: Final = 0x01  # torch.distributed's names and numbers


def shrink_group(
    ranks_to_exclude: list[int] | None = None,
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: object = None,
) -> ProcessGroup:
    """Form a new group from a group's ranks without some of them, and leave the old one.

    The ranks that stay call it, all with the same arguments; the excluded ranks do not. Without
    `ranks_to_exclude` they find the lost ranks among themselves, as MPI's MPIX_Comm_shrink does:
    each rank that is alive calls it. All get a group of the same members, even if more die
    meanwhile. It may follow a PeerLostError:

        try:
            dist.all_reduce(gradient)
        except dist.PeerLostError:
            dist.shrink_group()
            dist.all_reduce(gradient)

    A rank that is alive and does not call it within the group's timeout is left out.

    If it is the default group, the new group replaces it, its ranks are numbered from 0, and all
    groups created from the old one are left as well. The ranks synchronize through the old group's
    store, which must have survived: it does if `rallypoint run` or torchrun serves it.

    Args:
        ranks_to_exclude: ranks in the group, not global ones; None: those that are gone.
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
        RevokedError: the others have shrunk the group without this rank, which came too late.
    """
    old = resolve(group)
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise InvalidArgumentError(
            f"shrink_flags={shrink_flags!r} is not SHRINK_DEFAULT or SHRINK_ABORT"
        )
    if ranks_to_exclude is not None:
        _check(ranks_to_exclude, old)
    old.check_member()
    if ranks_to_exclude is None:
        if shrink_flags == SHRINK_ABORT:
            old.revoke()
        return _without_the_lost(old)
    if shrink_flags == SHRINK_ABORT:
        for each in old.world.subgroups if old.is_world else ():
            each.abort()
        old.abort()
    kept = [rank for rank in range(old.size()) if rank not in ranks_to_exclude]
    formed = _formed(old, kept)
    _replace(old, formed)
    return formed


def _without_the_lost(old: ProcessGroup) -> ProcessGroup:
    """The survivors agree on their ranks, form the group, and agree that all have formed it."""
    before: list[int] = []
    while True:
        old.counts["shrink"] += 1
        name = f"shrink/{old.counts['shrink']}"
        survivors = survivors_of(old)
        kept = json.loads(decide(survivors, name, "", lambda came: json.dumps(sorted(came))))
        if old.own_rank not in kept:
            raise RevokedError(
                "the other ranks of the group have shrunk it without this rank, which came later "
                "than the group's timeout allows; end this process, or form another group"
            )
        failed: RallypointError | None = None
        formed = None
        try:
            formed = _formed(old, kept)
        except RallypointError as error:
            failed = error
        well = decide(survivors, f"{name}/formed", str(failed is None), _are_all, members=kept)
        if formed is not None and well == str(True):
            _replace(old, formed)
            return formed
        if formed is not None:
            leave(formed)
        if kept == before:  # no rank has died: it would fail again
            raise failed or PeerError(
                "another rank could not form the shrunk group; look for its first error"
            )
        before = kept


def _are_all(values: Mapping[int, str]) -> str:
    return str(all(value == str(True) for value in values.values()))


def _check(ranks: object, old: ProcessGroup) -> None:
    if not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks):
        raise InvalidTypeError(f"ranks_to_exclude must be a list of integers, not {ranks!r}")
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


def _formed(old: ProcessGroup, kept: list[int]) -> ProcessGroup:
    """The successor, beside the old group, which shows the members that end meanwhile."""
    world = old.world

    def gone() -> list[int]:
        return [kept.index(rank) for rank in old.communicator.gone() if rank in kept]

    if old.is_world:
        number = old.counts["shrink"]
        request = GroupRequest(
            store=world.store,
            prefix=f"{world.prefix}/kept {','.join(map(str, kept))}" + f"/{number}" * bool(number),
            rank=kept.index(old.own_rank),
            members=range(len(kept)),
            timeout=old.timeout,
            options=world.options,
            backend=old.backend,
            device=world.device,
            name=world.title,
            is_across_jobs=world.is_across_jobs,
            gone=gone,
        )
        return form_world(request, group_name=old.group_name)
    formed = form_group(
        world,
        [old.ranks[rank] for rank in kept],
        timeout=old.timeout,
        backend=old.backend,
        by_ranks=True,
        description=None if old.group_desc == "undefined" else old.group_desc,
        sort_ranks=False,
        gone=gone,
    )
    assert isinstance(formed, ProcessGroup)
    return formed


def _replace(old: ProcessGroup, formed: ProcessGroup) -> None:
    """Leave the old group."""
    if old.is_world:
        if GroupMember.WORLD is old:
            set_default(formed)
        old.world.leave_to(formed.world)
    else:
        leave(old)
