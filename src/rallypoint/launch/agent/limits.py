"""Limits of the system that a launch can reach."""

from __future__ import annotations

import errno
import os

from rallypoint.base.errors import SystemCallError

_EACH = 6  # descriptors of the agent for a worker, with log files


def limit_error(error: Exception, workers: int = 0) -> SystemCallError | None:
    """The error to raise for what the system refused the launcher; None for other problems."""
    from rallypoint.base.refusals import refusal_in  # only when something went wrong

    need = f"{workers} workers need about {24 + _EACH * workers}" if workers else ""
    return refusal_in(error, who="the launcher", need=need)


def make_room(connections: int) -> None:
    """See to it that this process can open so many more descriptors."""
    lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # that is free
    os.close(lowest)
    if _allows(lowest + connections):
        return
    allow_many_connections()
    if not _allows(lowest + connections):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _allows(descriptors: int) -> bool:
    limit = os.sysconf("SC_OPEN_MAX")  # without importing resource
    return limit < 0 or descriptors <= limit


def allow_many_connections() -> None:
    """Raise this process's limit of descriptors as far as possible."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:  # contextlib would cost each launch
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        return  # it works with fewer
