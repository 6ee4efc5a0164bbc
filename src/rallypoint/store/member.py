"""Who opened a file store, in a form by which others on the same machine can tell if it lives."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

_SEPARATOR = b"\0"


class Liveness(Enum):
    """What is known of a member."""

    ALIVE = "alive"
    DEAD = "dead"
    ELSEWHERE = "on another machine, so its process cannot be checked"


def identity() -> bytes:
    """Return this process's identity, different for each call."""
    pid = os.getpid()
    parts = (_machine(), b"%d" % pid, _start_of(pid) or b"", os.urandom(8).hex().encode())
    return _SEPARATOR.join(parts)


def liveness_of(member: bytes) -> Liveness:
    """Tell whether the process with that identity lives. A reused pid is not mistaken for it."""
    machine, pid, start, _ = member.split(_SEPARATOR)
    if machine != _machine():
        return Liveness.ELSEWHERE
    return Liveness.ALIVE if _start_of(int(pid)) == start else Liveness.DEAD


def _machine() -> bytes:
    # The boot id is the machine's until it restarts; the namespace tells containers apart.
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return boot_id + bytes(Path("/proc/self/ns/pid").readlink())


def _start_of(pid: int) -> bytes | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    state, start = fields[0], fields[19]
    return None if state in (b"Z", b"X") else start
