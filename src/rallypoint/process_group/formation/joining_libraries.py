"""Joins a group's members at other libraries, which connect them in their own way.

Few groups have such a library, so only they import this.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence

from rallypoint.base.errors import HostError, PeerLostError, RallypointError
from rallypoint.base.files import host_identity
from rallypoint.base.wording import brief
from rallypoint.process_group.delegated.backends import connect, why_absent
from rallypoint.process_group.delegated.delegate import Delegate, LibraryMember
from rallypoint.process_group.delegated.library_group import LibraryGroup
from rallypoint.process_group.formation.connecting import GroupRequest
from rallypoint.process_group.formation.host_network import network_of
from rallypoint.process_group.groups.call_errors import found_while_forming
from rallypoint.store.init_method import Presence
from rallypoint.store.prefix import PrefixStore

_LOOPBACK = "127.0.0.1"


def join_libraries(backends: Iterable[str], request: GroupRequest) -> dict[str, LibraryGroup]:
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
