"""How many descriptors this process may open, and whether that is enough for a group."""

from __future__ import annotations

import resource
from pathlib import Path

from rallypoint.base.errors import HostError

_SPARE = 200  # for whatever else the program opens


def make_room(needed: int, wished: int, *, ranks: int) -> None:
    """Raise the limit of descriptors for a number of connections, as far as the system allows.

    Args:
        needed: connections without which the group of `ranks` cannot form.
        wished: connections that may be made later, including the needed ones.

    Raises:
        HostError: the limit is lower than what is needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    try:
        is_open = len(list(Path("/proc/self/fd").iterdir()))
    except (FileNotFoundError, PermissionError):  # there is no /proc
        is_open = 0
    wanted = is_open + wished + _SPARE
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if is_open + needed > max(most, soft):
        raise HostError(
            f"this rank needs {is_open + needed} file descriptors, {needed} of them for "
            f"connections to {ranks} ranks, but its limit is {hard}; raise the hard limit "
            "(RLIMIT_NOFILE, ulimit -Hn)"
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))
