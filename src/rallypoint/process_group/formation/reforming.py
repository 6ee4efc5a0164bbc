"""Forms a default group again, with other members, while its object stays the same.

    1. withdraw   calls under way end, later ones raise RevokedError; subgroups are left for good
    2. join       ranks that meet under the new prefix form a new communicator, as for a new group
    3. enter      the object takes it over, with its ranks

A communicator is never repaired: what a rank of the old one still writes or sends goes to memory
and connections that no rank reads any more. The caller decides which ranks meet, and when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.formation.joining import join
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.store.init_method import JoinedStore


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

    Raises:
        InvalidArgumentError: it is not a default group.
        NotInitializedError: it was left, or belongs to the process that forked this one.
        StoreConnectionError, StoreTimeoutError, CollectiveTimeoutError, PeerLostError, HostError:
            as init_process_group.
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
