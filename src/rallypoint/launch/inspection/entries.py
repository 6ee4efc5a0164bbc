"""Where programs find the agents that run on this machine.

    DIRECTORY/PID-NAMESPACE.job     what it is: name=value, separated by NULs; locked while it lives
    DIRECTORY/PID-NAMESPACE.sock    where it answers (requests.py)

The directory belongs to the user and is closed to others; RALLYPOINT_RUN_DIR names another than the
usual one. Containers with different process numbers may share it. An agent that was killed leaves
its files behind; they are recognised by the missing lock, and removed by the next reader.

Root reads the directories of all users, who may have put anything there. So a directory is opened
once, following no link, and all else is done within it. Only regular files and sockets of the
directory's owner count, and nothing that is opened can block.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Mapping
from itertools import islice

from rallypoint.base.files import open_regular
from rallypoint.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.launch.job import Job

RUN_DIRECTORY = "RALLYPOINT_RUN_DIR"

_JOB, _SOCKET = ".job", ".sock"
_NEW = ".new"  # an entry until it is locked and complete, which takes less than a millisecond
_STARTS_S = 60.0  # an older one is of an agent that was killed meanwhile
_AS_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_ENTRIES = 1000  # in one directory
_MOST_WAITING = 16  # the limit of programs that ask at the same time
_MAX_BYTES = 64 << 10
_MOST_OF_COMMAND = 60  # characters
_ARGUMENTS = "\x1f"  # the separator
_CREDENTIALS = struct.Struct("=3i")  # a process, its user and group


class Entry:
    """An agent's own entry."""

    def __init__(self, about: Mapping[str, str]) -> None:
        self._name = f"{os.getpid()}{_namespace()}"
        self._directory = _make_own_directory()
        try:
            here = f"/proc/self/fd/{self._directory}"  # a socket's path must be short
            new = f"{here}/{self._name}{_NEW}"
            self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            os.lockf(self._file, os.F_TLOCK, 0)
            os.write(self._file, _encode(about)[:_MAX_BYTES])
            # Of a process that had this number before.
            _unlink(self._name + _SOCKET, self._directory)
            os.rename(new, f"{here}/{self._name}{_JOB}")
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._socket.bind(f"{here}/{self._name}{_SOCKET}")
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
        if peer_of(connection)[1] not in (0, os.geteuid()):
            connection.close()
            return None
        return connection

    def close(self) -> None:
        """Remove it."""
        for suffix in (_SOCKET, _JOB, _NEW):
            _unlink(self._name + suffix, self._directory)
        if hasattr(self, "_socket"):
            self._socket.close()
        if hasattr(self, "_file"):
            os.close(self._file)
        os.close(self._directory)


class Found(Record):
    """An agent that runs on this machine, as it described itself.

    Attributes:
        user: whose it is.
        path: of its files, without a suffix.
        about: see `describe_agent`.
    """

    pid: int
    user: int
    path: str
    about: Mapping[str, str]

    @property
    def run_id(self) -> str:
        """The job's name, or a random UUID."""
        return self.about.get("run_id", "")

    @property
    def name(self) -> str:
        """The job's name as it is shown."""
        return shown_name(self.run_id, self.command)

    @property
    def command(self) -> tuple[str, ...]:
        """What the workers run."""
        return tuple(self.about.get("command", "").split(_ARGUMENTS))

    @property
    def job(self) -> tuple[str, str]:
        """The same for all agents of one job, and different for other jobs."""
        return self.run_id, self.about.get("meets_at") or f"process {self.pid}"

    def connect(self, to_it: socket.socket) -> None:
        """Connect to its socket."""
        parent, _, name = self.path.rpartition("/")
        directory = os.open(parent, _AS_DIRECTORY)
        try:
            to_it.connect(f"/proc/self/fd/{directory}/{name}{_SOCKET}")  # its path may be long
        finally:
            os.close(directory)
        if peer_of(to_it) != (self.pid, self.user):  # it was a link to something else
            raise ConnectionRefusedError("another process listens there")


def shown_command(command: tuple[str, ...], directory: str = "") -> str:
    """``train.py --epochs 3 ...``: without the interpreter, in one line of a table.

    Args:
        command: what the workers run.
        directory: where they run, which is left out of paths; empty: unknown.
    """
    words = command[2:] if command[1:2] == ("-u",) else command  # of Python
    text = " ".join(word.removeprefix(f"{directory}/") if directory else word for word in words)
    if len(text) <= _MOST_OF_COMMAND:
        return text
    whole = text[: _MOST_OF_COMMAND - len(" ...") + 1].rpartition(" ")[0]
    return f"{whole or text[: _MOST_OF_COMMAND - len(' ...')]} ..."


def shown_name(run_id: str, command: tuple[str, ...]) -> str:
    """``train-1f0e`` for a job without a name, whose run id is a random UUID; else the run id.

    Args:
        command: what its workers run.
    """
    parts = run_id.split("-")
    is_uuid = [len(part) for part in parts] == [8, 4, 4, 4, 12]
    if not is_uuid or not set("".join(parts)) <= set("0123456789abcdef"):
        return run_id
    # PYTHON -u [-m] SCRIPT, PYTHON -u -c TEXT SCRIPT, or PROGRAM
    words = list(command[2:] if command[1:2] == ("-u",) else command[:1])
    is_module = words[:1] == ["-m"]
    words = words[1:] if is_module else words[2:] if words[:1] == ["-c"] else words
    script = words[0].rstrip("/").rpartition("/")[2] if words else ""
    stem = script.rpartition(".")[2] if is_module else script.removesuffix(".py")
    return f"{stem if stem.strip('-.') else 'job'}-{run_id[:4]}"


def describe_agent(job: Job, logs: str) -> dict[str, str]:
    """The description of its agent in an entry.

    Args:
        logs: the directory of the workers' output; empty: it is not kept.
    """
    nodes, rendezvous = job.nodes, job.rendezvous
    meets_at = f"{nodes.master_addr}:{nodes.master_port}" if nodes.count > 1 else ""
    nnodes = str(nodes.count)
    if rendezvous is not None:
        meets_at = ",".join(map(str, rendezvous.endpoints))
        nnodes = f"{rendezvous.min_nodes}:{rendezvous.max_nodes}"
    return {
        "run_id": job.run_id,
        "meets_at": meets_at,  # the job's endpoint; empty: it has only one node
        "command": _ARGUMENTS.join(job.command),
        "directory": os.getcwd(),
        "logs": logs,
        "began": str(time.time()),
        "nnodes": nnodes,
    }


def make_entry(job: Job, logs: str) -> Entry | None:
    """Register this agent for programs; None if that is not possible, which harms nothing else."""
    try:
        return Entry(describe_agent(job, logs))
    except OSError as error:
        if directory := job.environ.get(RUN_DIRECTORY):
            from rallypoint.launch.output.terminal import say

            say(
                f"warning: cannot use {RUN_DIRECTORY}={directory} ({error.strerror or error}), so"
                " `rallypoint ps` and other commands will not find this job, and hangs are not"
                " reported."
            )
        return None


def running_agents() -> list[Found]:
    """This user's agents on this machine (for root: all users'), oldest first.

    Entries of agents that were killed are removed.
    """
    found, namespace = [], _namespace()
    for path in _directories():
        try:
            directory = _Directory(path)
        except OSError:
            continue
        with directory:
            for name in directory.names():
                number, _, _ = name.partition("-")
                if not number.isdecimal():
                    continue
                about = directory.read(name)
                if about is not None and name.endswith(namespace):
                    found.append(Found(int(number), directory.owner, f"{path}/{name}", about))
    return sorted(found, key=lambda each: (each.about.get("began", ""), each.pid))


class _Directory:
    """A user's directory of entries, by its descriptor."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, _AS_DIRECTORY)
        status = os.fstat(self._fd)
        self.owner = status.st_uid
        if stat.S_IMODE(status.st_mode) & 0o077 or os.geteuid() not in (0, self.owner):
            os.close(self._fd)
            raise PermissionError(f"{path} is accessible to other users")

    def __enter__(self) -> _Directory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def names(self) -> list[str]:
        """The entries, without suffixes. Those that were never completed are removed."""
        names = os.listdir(self._fd)
        for name in islice((each for each in names if each.endswith(_NEW)), _MOST_ENTRIES):
            self._remove_incomplete(name)
        found = (each.removesuffix(_JOB) for each in names if each.endswith(_JOB))
        return list(islice(found, _MOST_ENTRIES))

    def _remove_incomplete(self, name: str) -> None:
        """Remove the file of an agent that was killed before its entry was complete."""
        try:
            status = os.lstat(name, dir_fd=self._fd)
        except OSError:
            return
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == self.owner
        if is_own and time.time() - status.st_mtime > _STARTS_S:
            _unlink(name, self._fd)

    def read(self, name: str) -> dict[str, str] | None:
        """The agent's description, if it is alive."""
        try:
            file = open_regular(name + _JOB, os.O_RDWR | os.O_NOFOLLOW, directory=self._fd)
        except OSError:
            return None
        try:
            if os.fstat(file).st_uid != self.owner:
                return None
            try:
                os.lockf(file, os.F_TLOCK, 0)
            except OSError:
                return _decode(os.read(file, _MAX_BYTES))
            for suffix in (_SOCKET, _JOB):
                _unlink(name + suffix, self._fd)
        except OSError:
            return None
        finally:
            os.close(file)
        return None


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end, and its user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def _namespace() -> str:
    """The namespace in which process numbers are the same as here."""
    return f"-{os.stat('/proc/self/ns/pid').st_ino}"


def _encode(about: Mapping[str, str]) -> bytes:
    return "\0".join(f"{name}={value}" for name, value in about.items()).encode(
        errors="surrogateescape"
    )


def _decode(data: bytes) -> dict[str, str] | None:
    """None if no agent has written it."""
    pairs = (line.partition("=") for line in data.decode(errors="surrogateescape").split("\0"))
    about = {name: value for name, _, value in pairs}
    try:
        float(about["began"])
    except (KeyError, ValueError):
        return None
    return about


def _unlink(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:
        return


def _own_directories() -> tuple[str, ...]:
    """Where this user's entries may be, in the order in which a directory is made."""
    given = os.environ.get(RUN_DIRECTORY)
    if given:
        return (os.path.abspath(given),)
    user = os.geteuid()
    runtime = f"/run/user/{user}"
    return (*([f"{runtime}/rallypoint"] if _is_own(runtime) else []), f"/tmp/rallypoint-{user}")


def _make_own_directory() -> int:
    """The first existing directory that belongs only to this user."""
    *others, last = _own_directories()
    for path in others:
        try:
            return _open_directory(path)
        except OSError:
            continue
    return _open_directory(last)


def _open_directory(path: str) -> int:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not _is_own(path):
            raise PermissionError(f"{path} is accessible to other users") from None
    return os.open(path, _AS_DIRECTORY)


def _is_own(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_closed = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and is_closed


def _directories() -> list[str]:
    """Where entries may be, whatever the environment of the asking program, unless it names one."""
    if os.environ.get(RUN_DIRECTORY) or os.geteuid() != 0:
        return list(_own_directories())
    directories = list(_own_directories())
    for parent, prefix, below in (("/run/user", "", "/rallypoint"), ("/tmp", "rallypoint-", "")):
        try:
            names = os.listdir(parent)
        except OSError:
            continue
        users = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        directories += [f"{parent}/{prefix}{user}{below}" for user in users if user.isdecimal()]
    return list(dict.fromkeys(directories))
