"""Where programs find the agents that run on this machine.

    DIRECTORY/PID-NAMESPACE.job     what it is: name=value, separated by NULs; locked while it lives
    DIRECTORY/PID-NAMESPACE.sock    where it answers (requests.py)

The directory belongs to the user and is closed to others. Containers with different process numbers
may share it. An agent that was killed leaves its files behind; they are recognised by the missing
lock, and removed by the next program that reads the directory.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Mapping

from rallypoint.base.record import Record

_JOB, _SOCKET = ".job", ".sock"
_MOST_WAITING = 16  # the limit of programs that ask at the same time
_MAX_BYTES = 64 << 10
_ARGUMENTS = "\x1f"  # the separator
_CREDENTIALS = struct.Struct("=3i")  # a process, its user and group


class Entry:
    """An agent's own entry.

    Raises:
        OSError: no directory for it can be used; nothing is left behind.
    """

    def __init__(self, about: Mapping[str, str]) -> None:
        self._name = f"{os.getpid()}{_namespace()}"
        self._directory, path = _open_own_directory()
        try:
            new = f"{path}/{self._name}.new"  # until it is locked and complete
            self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            os.lockf(self._file, os.F_TLOCK, 0)
            os.write(self._file, _encode(about)[:_MAX_BYTES])
            self._remove(_SOCKET)  # of a process that had this number before
            os.rename(new, f"{path}/{self._name}{_JOB}")
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._socket.bind(f"{path}/{self._name}{_SOCKET}")
            self._socket.listen(_MOST_WAITING)
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        """The socket that programs connect to."""
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """The next program that connects, if it is allowed: this user's, or root's."""
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return None
        connection.setblocking(False)
        _, user, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user not in (0, os.geteuid()):
            connection.close()
            return None
        return connection

    def close(self) -> None:
        """Remove it."""
        for suffix in (_SOCKET, _JOB):
            self._remove(suffix)
        if hasattr(self, "_socket"):
            self._socket.close()
        if hasattr(self, "_file"):
            os.close(self._file)
        os.close(self._directory)

    def _remove(self, suffix: str) -> None:
        try:
            os.unlink(self._name + suffix, dir_fd=self._directory)
        except OSError:
            return


class Found(Record):
    """An agent that runs on this machine, as it described itself.

    Attributes:
        socket: the path of its socket.
        about: see `describe_agent`.
    """

    pid: int
    socket: str
    about: Mapping[str, str]

    @property
    def run_id(self) -> str:
        """The job's name."""
        return self.about.get("run_id", "")

    @property
    def command(self) -> tuple[str, ...]:
        """What the workers run."""
        return tuple(self.about.get("command", "").split(_ARGUMENTS))

    @property
    def job(self) -> tuple[str, str]:
        """The same for all agents of one job, and different for other jobs."""
        return self.run_id, self.about.get("meets_at") or f"process {self.pid}"


def describe_agent(
    *, run_id: str, meets_at: str, command: tuple[str, ...], logs: str, began: float, nnodes: str
) -> dict[str, str]:
    """The entry's description of its agent.

    Args:
        meets_at: where the job's nodes meet, as one word; empty: it has only one node.
        logs: the directory of the workers' output; empty: it is not kept.
        began: seconds since the epoch.
        nnodes: the number of nodes that the job wants, e.g. ``"2:4"``.
    """
    return {
        "run_id": run_id,
        "meets_at": meets_at,
        "command": _ARGUMENTS.join(command),
        "directory": os.getcwd(),
        "logs": logs,
        "began": str(began),
        "nnodes": nnodes,
    }


def running_agents() -> list[Found]:
    """This user's agents on this machine (for root: all users'), oldest first.

    Entries of agents that were killed are removed.
    """
    found, namespace = [], _namespace()
    for directory in _directories():
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            number, _, _ = name.partition("-")
            if not (name.endswith(_JOB) and number.isdecimal()):
                continue
            path = f"{directory}/{name.removesuffix(_JOB)}"
            about = _read(path)
            if about is not None and path.endswith(namespace):
                found.append(Found(int(number), path + _SOCKET, about))
    return sorted(found, key=lambda each: (each.about.get("began", ""), each.pid))


def _namespace() -> str:
    """The namespace in which process numbers are the same as here."""
    return f"-{os.stat('/proc/self/ns/pid').st_ino}"


def _encode(about: Mapping[str, str]) -> bytes:
    return "\0".join(f"{name}={value}" for name, value in about.items()).encode(
        errors="surrogateescape"
    )


def _read(path: str) -> dict[str, str] | None:
    """The agent's description, if it is alive."""
    try:
        file = os.open(path + _JOB, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        try:
            os.lockf(file, os.F_TLOCK, 0)
        except OSError:
            text = os.read(file, _MAX_BYTES).decode(errors="surrogateescape")
            pairs = (line.partition("=") for line in text.split("\0"))
            return {name: value for name, _, value in pairs}
        for suffix in (_SOCKET, _JOB):
            _unlink(path + suffix)
    except OSError:
        return None
    finally:
        os.close(file)
    return None


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def _own_places() -> tuple[str, str]:
    user = os.geteuid()
    return f"/run/user/{user}", f"/tmp/rallypoint-{user}"


def _open_own_directory() -> tuple[int, str]:
    """The first existing directory that belongs only to this user."""
    runtime, temporary = _own_places()
    if _is_own(runtime):
        runtime += "/rallypoint"
        try:
            return _open_directory(runtime)
        except OSError:
            pass
    return _open_directory(temporary)


def _open_directory(path: str) -> tuple[int, str]:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not _is_own(path):
            raise PermissionError(f"{path} is accessible to other users") from None
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return descriptor, path


def _is_own(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_closed = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and is_closed


def _directories() -> list[str]:
    """Where entries may be, whatever the environment of the asking program."""
    runtime, temporary = _own_places()
    places = [f"{runtime}/rallypoint", temporary]
    if os.geteuid() != 0:
        return [place for place in places if _is_own(place)]
    for parent, prefix, below in (("/run/user", "", "/rallypoint"), ("/tmp", "rallypoint-", "")):
        try:
            names = os.listdir(parent)
        except OSError:
            continue
        users = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        places += [f"{parent}/{prefix}{user}{below}" for user in users if user.isdecimal()]
    return [place for place in dict.fromkeys(places) if os.path.isdir(place)]
