"""The place of this process in its job's present round, as its launcher tells it.

A worker on standby waits for its first one. One that goes on when others are lost, and loses them
before its group has formed, waits for the next.
"""

from __future__ import annotations

import os

from rallypoint.base.control_link import control_link, existing_link
from rallypoint.base.control_message import Ready
from rallypoint.base.worker_env import STANDBY

ROUND = "TORCHELASTIC_RESTART_COUNT"
_EVER_S = 1e9
_NEWS_S = 30.0  # a launcher that sees a worker end tells the others within milliseconds


def await_place() -> None:
    """Wait for a place, if this process is on standby, and put it into the environment."""
    if os.environ.get(STANDBY) != "1":
        return
    link = control_link()
    if link is None:  # a child of the worker, which has no place
        return
    link.send(Ready())
    place = link.wait(-1, _EVER_S)
    if place is not None:
        os.environ.update(place.environ)
        del os.environ[STANDBY]


def is_superseded() -> bool:
    """Whether a newer round than that of the environment has begun; the store of this one ends."""
    link = existing_link()
    newest = None if link is None else link.newest
    return newest is not None and newest.round > int(os.environ.get(ROUND, "0"))


def take_next_place() -> bool:
    """After a loss: wait for the next place, if this process goes on without those lost.

    Returns whether there is one; then the environment names it.
    """
    link = control_link()
    if link is None or not link.is_elastic:
        return False
    place = link.wait(int(os.environ.get(ROUND, "0")), _NEWS_S)
    if place is None:
        return False
    os.environ.update(place.environ)
    return True
