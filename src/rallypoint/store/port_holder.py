"""Who holds a TCP port of this machine: from the kernel's tables, without a subprocess."""

from __future__ import annotations

from pathlib import Path

_LISTEN = "0A"


def holder_of(port: int) -> str:
    """``"process 4242 (python train.py)"``, or why that is not known."""
    owners = _owners(port)
    if not owners:
        return "a connection that is still closing, or a process of another container"
    sockets = {f"socket:[{inode}]" for inode in owners}
    for process in Path("/proc").glob("[0-9]*"):
        if _holds(process, sockets):
            return f"process {process.name} ({_command(process)})"
    return f"a process of user id {next(iter(owners.values()))}, not visible from here"


def is_launcher(holder: str) -> bool:
    """Whether that process, in the words of `holder_of`, is `rallypoint` or `python -m rallypoint`.

    A folder of that name on the way to its Python or its script does not count.
    """
    words = holder.replace("(", " ").replace(")", " ").split()
    return any(word.rpartition("/")[2].partition(".")[0] == "rallypoint" for word in words)


def _owners(port: int) -> dict[str, str]:
    """The user ids of the sockets that listen there, by inode."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *rest = line.split()
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                found[rest[5]] = rest[3]
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
