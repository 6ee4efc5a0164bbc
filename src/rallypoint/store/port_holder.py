"""Who holds a TCP port of this machine: from the kernel's tables, without a subprocess."""

from __future__ import annotations

from pathlib import Path

_LISTEN = "0A"


def holder_of(port: int) -> str:
    """``"process 4242 (python train.py)"``, or why that is not known."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not sockets:
        return "a connection that is still closing, or a process of another container"
    for process in Path("/proc").glob("[0-9]*"):
        if _holds(process, sockets):
            return f"process {process.name} ({_command(process)})"
    return "a process of another user or container"


def _inodes(port: int) -> list[str]:
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *rest = line.split()
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                found.append(rest[5])
    return found


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # it is another user's, or gone
        return False
    for descriptor in descriptors:
        try:
            if str(descriptor.readlink()) in sockets:
                return True
        except OSError:
            continue
    return False


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes()[:400].rstrip(b"\0").split(b"\0")
    except OSError:
        return "ended meanwhile"
    # One line, even for a program that is given as text.
    text = " ".join(b" ".join(words).decode(errors="replace").split())
    return text if len(text) <= 100 else text[:97] + "..."
