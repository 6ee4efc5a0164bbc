"""Limits of the system that a launch can reach, as sentences: which, how high, what to do."""

from __future__ import annotations

import errno
import os

from rallypoint.base.errors import HostError, RallypointError

_EACH = 6  # descriptors of the agent for a worker, with log files


def limit_error(error: Exception, workers: int = 0) -> HostError | None:
    """The error to raise for a limit that was reached; None if it was another problem."""
    if isinstance(error, RallypointError):
        return None  # it has its sentence
    import resource  # only when something went wrong

    number = _number_of(error)

    def told(which: int) -> str:
        soft, hard = resource.getrlimit(which)
        return f"{soft} here" + (f", and {hard} if you ask for it" if hard != soft else "")

    if number in (errno.EMFILE, errno.ENFILE):
        need = f"; {workers} workers need about {24 + _EACH * workers}" if workers else ""
        return HostError(
            f"the launcher ran out of file descriptors ({told(resource.RLIMIT_NOFILE)}{need}):"
            " raise the limit with ulimit -n."
        )
    if number == errno.EAGAIN:
        return HostError(
            "the launcher cannot start more processes (this user's limit is "
            f"{told(resource.RLIMIT_NPROC)}, for all processes, and a control group may set a "
            "lower one): raise it with ulimit -u, or end other processes."
        )
    if number == errno.ENOMEM:
        return HostError("the launcher ran out of memory: free some, or start fewer workers.")
    return None


def _number_of(error: Exception) -> int | None:
    """The errno of an OSError; errors from native code and threads only have its text."""
    if isinstance(error, OSError):
        return error.errno
    if str(error) == "can't start new thread":
        return errno.EAGAIN
    numbers = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
    return next((each for each in numbers if str(error).endswith(os.strerror(each))), None)


def allow_many_connections() -> None:
    """Raise this process's limit of descriptors as far as possible."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:  # contextlib would cost each launch
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        return  # it works with fewer
