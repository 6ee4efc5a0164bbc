"""How long the operations of a group wait for a peer, as given by callers."""

from __future__ import annotations

from datetime import timedelta

from rallypoint.store.store import seconds_of

default_pg_timeout = timedelta(minutes=30)  # torch.distributed's name


def check_timeout(timeout: timedelta | None, default: timedelta) -> timedelta:
    """A timeout, or the default if it is None.

    Raises:
        InvalidTypeError, InvalidArgumentError: it is not a timedelta, or not positive.
    """
    if timeout is None:
        return default
    seconds_of(timeout)
    return timeout
