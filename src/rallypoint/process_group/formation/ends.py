"""Brings together the members of a group whose calls another backend's library serves.

They meet at the store, as those of the engine do, and the library connects them in its own way.
Each member's key stays there while it is in the group, so that others can see which member died.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from rallypoint.base.durations import brief
from rallypoint.base.errors import HostError, PeerLostError, RallypointError
from rallypoint.cluster.interface import host_identity
from rallypoint.process_group.delegated.backends import connect, why_absent
from rallypoint.process_group.delegated.delegate import Delegate, LibraryMember
from rallypoint.process_group.delegated.library_group import LibraryGroup
from rallypoint.process_group.formation.own_interface import network_of
from rallypoint.process_group.groups.first_lost import found_while_forming
from rallypoint.store.init_method import Presence, await_ranks
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

    Args:
        backends: the names of other backends.
        device: of this process; None: by LOCAL_RANK.
        title: the group's name for people.

    Raises:
        HostError: a library is missing, on this rank or another, or cannot connect the members.
        StoreTimeoutError, CollectiveTimeoutError: members did not join; the message names them.
        PeerLostError: a member joined and died.
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
