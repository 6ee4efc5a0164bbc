"""Which rank died first, when several lose each other while a group forms.

A rank that gives up because of a death closes its connections or exits, and then looks dead itself
to ranks that have not noticed the first death, whether they are still forming the group or have
already formed it. So every rank asks the store before it raises: the store shows whose connection
ended, and keeps the first answer for all. Once all ranks have formed the group, the engine itself
reports the first death, and the store is no longer asked.
"""

from __future__ import annotations

from datetime import timedelta

from rallypoint.base.errors import HostError, PeerLostError
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.store.init_method import Presence, shows_deaths

_FORMING_S = 1.0  # how long the store may take to show a death
_ANSWER = timedelta(seconds=2)  # of the store, for each request
_FORMED_S = 2.0  # longer: a forming rank settles on a name at the end of its own second


def formed_key(prefix: str) -> str:
    """The counter of ranks that have formed the group; deleted once all have."""
    return f"{prefix}/formed"


def found_while_forming(
    presence: Presence, error: PeerLostError | HostError, *, is_last_to_leave: bool
) -> PeerLostError | HostError:
    """The error of a rank that cannot form the group: the first death, or else its own error.

    `is_last_to_leave`: the store may end with this rank, while the others still have to ask it.
    """
    suspect = error.rank if isinstance(error, PeerLostError) else None
    found = presence.find_lost(_FORMING_S, suspect=suspect)
    if found is not None and is_last_to_leave:
        presence.await_leaving(0)
    return found or error


def found_when_formed(group: ProcessGroup, error: PeerLostError) -> PeerLostError:
    """The same for an operation of a group that other ranks may still be forming.

    If the engine named the right rank, its error is more detailed than the store's.
    """
    if group.is_world and group.world.has_met:
        return error
    store = group.world.store
    forming = formed_key(group.prefix)
    presence = Presence(store, group.prefix, group.ranks)
    timeout = store.timeout
    try:
        store.set_timeout(_ANSWER)  # it may have been lost with the rank
        if not shows_deaths(store) or not store.check([forming]):
            return error
        found = presence.find_lost(_FORMED_S, as_long_as=forming)
        if found is not None and group.is_world and group.own_rank == 0:
            presence.await_leaving(0)
    except (HostError, OSError):
        return error  # the store is gone, together with the process that served it
    finally:
        store.set_timeout(timeout)
    return error if found is None or found.rank == error.rank else found
