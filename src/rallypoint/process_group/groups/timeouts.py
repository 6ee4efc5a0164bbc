"""How long the operations of a group may wait for a peer, as callers give it."""

from __future__ import annotations

from datetime import timedelta

from rallypoint.store.store import seconds_of

default_pg_timeout = timedelta(minutes=30)  # torch.distributed's name


def check_timeout(timeout: timedelta | None, default: timedelta) -> timedelta:
    """A timeout, or the default for None.

    Raises:
        InvalidTypeError, InvalidArgumentError: no timedelta, or not positive.
    """
    if timeout is None:
        return default
    seconds_of(timeout)
    return timeout
