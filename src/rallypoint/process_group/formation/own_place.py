"""This process's place in the current round: its rank, sizes and store, from the launcher.

A spare waits for its first place. A worker that has lost others waits for its next one, and reports
the loss if the launcher knows of none.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rallypoint.base.errors import CollectiveTimeoutError, HostError, RallypointError, StoreError
from rallypoint.base.worker_env import STANDBY

if TYPE_CHECKING:
    from rallypoint.base.control_link import ControlLink
    from rallypoint.base.control_message import Place

ROUND = "TORCHELASTIC_RESTART_COUNT"
_EVER_S = 1e9
# A launcher that sees a worker end reports it to the others within milliseconds. If no word has
# come by then, the worker reports the loss; then all connect again, or continue without some. Once
# the launcher has said that a worker is kept, the worker waits as long as the launcher lives, which
# may itself wait for another node.
_NEWS_S = 2.0
_REMEDY_S = 30.0
# For each hundred ranks, where the others can continue without some; connecting takes milliseconds.
CONNECT = timedelta(seconds=10)


def control_link() -> ControlLink | None:
    """See base/control_link.py, which only spares and workers that outlive others need."""
    from rallypoint.base import control_link as room

    return room.control_link()


def existing_link() -> ControlLink | None:
    """The link of this process, if it has begun."""
    room: Any = sys.modules.get("rallypoint.base.control_link")
    found: ControlLink | None = None if room is None else room.existing_link()
    return found


def await_place() -> None:
    """Wait for a place, if this process is on standby, and put it into the environment."""
    if os.environ.get(STANDBY) != "1":
        return
    link = control_link()
    if link is None:  # a child of the worker, which has no place
        return
    link.ready()
    place = link.wait(-1, _EVER_S)
    if place is not None:
        os.environ.update(place.environ)
        del os.environ[STANDBY]


def is_superseded() -> bool:
    """Whether a newer round than that of the environment has begun; the store of this one ends."""
    link = existing_link()
    newest = None if link is None else link.newest
    return newest is not None and newest.round > int(os.environ.get(ROUND, "0"))


def connect_timeout() -> timedelta | None:
    """How long connecting may take for each hundred ranks that have come; None: no limit."""
    link = existing_link()
    return CONNECT if link is not None and link.is_newcomer else None


def next_place(
    after: int, loss: RallypointError | None, *, had_formed: bool = False
) -> Place | None:
    """This process's place in the round that follows `after`, in which it has lost others.

    None: the launcher offers none. `had_formed`: the group had formed in that round.
    """
    link = control_link()
    if link is None:
        return None
    place = link.wait(after, _NEWS_S)
    if place is None and not link.is_kept(after):
        from rallypoint.base.control_message import LostContact  # others do not pay for it

        link.send(LostContact(after, _culprit_of(loss), had_formed))
        place = link.wait(after, _REMEDY_S)
    while place is None and link.is_kept(after):
        place = link.wait(after, _REMEDY_S)
    return place


def _culprit_of(error: RallypointError | None) -> int:
    """The rank that this one could not reach; -1: it knows only that others have given up."""
    if isinstance(error, StoreError):
        return 0  # the round's store is served at its host
    rank = error.rank if isinstance(error, CollectiveTimeoutError | HostError) else None
    return -1 if rank is None else rank


def take_next_place(loss: RallypointError) -> bool:
    """After a loss, wait for the next place, and put it into the environment.

    Returns False if there is none, or this process does not outlive others.
    """
    link = control_link()
    if link is None or not link.is_elastic:
        return False
    place = next_place(int(os.environ.get(ROUND, "0")), loss)
    if place is None:
        return False
    os.environ.update(place.environ)
    return True
