"""The agent's face of the guardian, the small native process between the agent and the workers.

It starts workers, signals their groups and tells of their ends; when the agent dies, however it
dies, the guardian ends all that is below it. Its side of this is native/guardian/; protocol.h there
defines the bytes. Why it exists: docs/decisions/010-guardian.md.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.record import Record

_PROGRAM = os.path.join(os.path.dirname(__file__), "guardian")
_MAX_PAYLOAD = 8 << 20
_HEADER = struct.Struct("=II")
_SPAWN = struct.Struct("=III")
_SIGNAL = struct.Struct("=II")
_REPORT = struct.Struct("=6q")
_KIND_SPAWN, _KIND_SIGNAL, _KIND_END = 1, 2, 3


class ReportKind(IntEnum):
    """What the guardian tells; `Report`'s fields mean what protocol.h says there."""

    STARTED = 1
    EXITED = 2
    SPAWN_FAILED = 3
    UNKILLABLE = 4
    ENDED = 5


class GuardianLostError(HostError):
    """The guardian process is gone, and every worker with it."""


class Report(Record):
    """One thing that happened below the guardian."""

    kind: ReportKind
    worker: int
    pid: int
    code: int
    status: int
    time_s: float


class Guardian:
    """A running guardian. Register `fileno()` for reading; then `read()`."""

    def __init__(self, *, temporary_directory: str = "") -> None:
        """Start it; at its end, it removes the temporary directory (an absolute path) too."""
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            argv = ["rallypoint-guardian", str(theirs.fileno()), str(os.getpid())]
            argv.append(temporary_directory)
            try:
                self.pid = os.posix_spawn(_PROGRAM, argv, {})
            except OSError as error:
                ours.close()
                raise HostError(
                    f"cannot start the guardian {_PROGRAM}: {error.strerror};"
                    " install the package again (pip install --force-reinstall rallypoint)."
                ) from None
        # A guardian that hangs must not hang the agent, which then takes it for lost.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 8, 0))
        self._socket = ours
        self._partial = b""

    def fileno(self) -> int:
        """The socket to wait on."""
        return self._socket.fileno()

    def spawn(
        self,
        worker: int,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        descriptors: tuple[int, int, int, int, int],
        directory: str = "",
        cpus: Collection[int] = (),
    ) -> None:
        """Ask for a worker.

        `descriptors` become its stdin, stdout, stderr, control socket, and flight record's memory.
        It may run on `cpus` only, if there are any.

        Raises:
            InvalidArgumentError: the command or the environment is too long.
            GuardianLostError: there is no guardian any more.
        """
        places = ",".join(map(str, sorted(cpus)))
        strings = [os.fsencode(directory), places.encode(), *map(os.fsencode, argv)]
        strings += [os.fsencode(f"{name}={value}") for name, value in environ.items()]
        text = b"\0".join(strings) + b"\0"
        if text.count(b"\0") != len(strings):
            raise InvalidArgumentError(
                "the worker's command line or environment holds a NUL character; take it out."
            )
        payload = _SPAWN.pack(worker, len(argv), len(environ)) + text
        if len(payload) > _MAX_PAYLOAD:
            raise InvalidArgumentError(
                f"the worker's command line and environment take {len(payload)} bytes, more than"
                " Linux can hand to a program; pass large data in a file."
            )
        self._send(_KIND_SPAWN, payload, descriptors)

    def signal(self, worker: int, signal: int) -> None:
        """Send `signal` to the worker's process group, if the worker still runs."""
        self._send(_KIND_SIGNAL, _SIGNAL.pack(worker, signal))

    def end(self) -> None:
        """Kill and reap everything; the reports end with ENDED."""
        self._send(_KIND_END, b"")

    def read(self) -> list[Report]:
        """The next reports, in the order in which things happened; blocks if there is none.

        Raises:
            GuardianLostError: there is no guardian any more.
        """
        try:
            got = self._socket.recv(_REPORT.size * 256)
        except ConnectionError:
            got = b""
        if not got:
            raise GuardianLostError("the guardian process died; all workers died with it.")
        data = self._partial + got
        whole = len(data) // _REPORT.size * _REPORT.size
        self._partial = data[whole:]
        return [
            Report(ReportKind(kind), worker, pid, code, status, time_ns / 1e9)
            for kind, worker, pid, code, status, time_ns in _REPORT.iter_unpack(data[:whole])
        ]

    def close(self, patience_s: float = 8.0) -> None:
        """Let the guardian go; it kills what is left. One that takes longer is killed itself."""
        self._socket.close()
        try:
            if not self._wait_for_end(patience_s):
                os.kill(self.pid, signal.SIGKILL)
                self._wait_for_end(1.0)
            os.waitpid(self.pid, os.WNOHANG)
        except (ChildProcessError, ProcessLookupError):  # someone else has reaped it
            return

    def _wait_for_end(self, patience_s: float) -> bool:
        """Whether it has ended within this time."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([pidfd], [], [], patience_s)[0])
        finally:
            os.close(pidfd)

    def _send(self, kind: int, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        data = memoryview(_HEADER.pack(len(payload), kind) + payload)
        try:
            if descriptors:
                sent = socket.send_fds(self._socket, [data], list(descriptors))
                data = data[sent:]
            self._socket.sendall(data)
        except (ConnectionError, BlockingIOError):
            raise GuardianLostError(
                "the guardian process died; all workers died with it."
            ) from None
