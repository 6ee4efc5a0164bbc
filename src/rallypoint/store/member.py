"""Who opened a file store, in a form by which others on the same machine can tell if it lives."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

from rallypoint.base.process_end import is_running, start_of

_SEPARATOR = b"\0"


class Liveness(Enum):
    """What is known of a member."""

    ALIVE = "alive"
    DEAD = "dead"
    ELSEWHERE = "on another machine, so its process cannot be checked"


def identity() -> bytes:
    """Return this process's identity, different for each call."""
    pid = os.getpid()
    parts = (_machine(), b"%d" % pid, start_of(pid) or b"", os.urandom(8).hex().encode())
    return _SEPARATOR.join(parts)


def liveness_of(member: bytes) -> Liveness:
    """Tell whether the process with that identity lives. A reused pid is not mistaken for it."""
    machine, pid, start, _ = member.split(_SEPARATOR)
    if machine != _machine():
        return Liveness.ELSEWHERE
    return Liveness.ALIVE if is_running(int(pid), start) else Liveness.DEAD


def _machine() -> bytes:
    # The boot id is the machine's until it restarts; the namespace tells containers apart.
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        return boot_id + bytes(Path("/proc/self/ns/pid").readlink())
    except OSError:  # there is no /proc
        return os.fsencode(os.uname().nodename)
