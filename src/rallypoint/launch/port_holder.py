"""Who holds a TCP port of this machine: from the kernel's tables, without a subprocess."""

from __future__ import annotations

import os

_LISTEN = "0A"


def holder_of(port: int) -> str:
    """``"process 4242 (python train.py)"``, or why that is not known."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not sockets:
        return "a connection that is still closing, or a process of another container"
    for name in os.listdir("/proc"):
        if name.isdigit() and _holds(name, sockets):
            return f"process {name} ({_command(name)})"
    return "a process of another user or container"


def _inodes(port: int) -> list[str]:
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                lines = file.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *rest = line.split()
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                found.append(rest[5])
    return found


def _holds(pid: str, sockets: set[str]) -> bool:
    directory = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(directory)
    except OSError:  # another user's, or gone
        return False
    for descriptor in descriptors:
        try:
            if os.readlink(f"{directory}/{descriptor}") in sockets:
                return True
        except OSError:
            continue
    return False


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(400).rstrip(b"\0").split(b"\0")
    except OSError:
        return "ended meanwhile"
    text = b" ".join(words).decode(errors="replace")
    return text if len(text) <= 100 else text[:97] + "..."
