"""The agent's side of the guardian, the small native process between the agent and the workers.

It starts workers, signals their process groups, and reports when they end, are stopped or continue.
When the agent dies, however it dies, the guardian ends all processes below it; when the agent does
not renew a fence in time, it ends or pauses them. A guardian that stops reading blocks no process:
requests are queued here. Its own side is native/guardian/, where protocol.h defines the bytes.
`choose_sessions` says in which sessions the workers live. Reasons: docs/decisions/010-guardian.md.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.launch.worker_group import WorkerExit

EACH, ONE = "each", "one"  # a session for each worker, or one for all
_VARIABLE = "RALLYPOINT_SESSIONS"  # if chosen by the user
_WEIGHT_RATIO = 1.25  # between neighbouring nice values, by the kernel's table
_LOWEST_NICE = -20


def choose_sessions(workers: int, environ: Mapping[str, str]) -> str:
    """What the guardian should do: see its main.cc.

    Where the kernel groups tasks by session (autogroups), each session has the same share of a busy
    machine, and a process yields its core only to others of its session. So the workers share one
    session, whose share is raised to that of one session per worker. Where the kernel does not
    permit that, workers that can have a core each get a session each, and others share one.
    docs/decisions/017-sessions.md
    """
    wish = environ.get(_VARIABLE, "")
    if wish == EACH or workers == 1:
        return EACH
    has_cores = workers <= len(os.sched_getaffinity(0))
    otherwise = EACH if has_cores and wish != ONE else ONE
    return f"{nice_of(workers)}:{otherwise}"


def nice_of(sessions: int) -> int:
    """The nice value whose weight is closest to that of this many sessions."""
    nice, weight = 0, 1.0
    while weight * _WEIGHT_RATIO**0.5 < sessions and nice > _LOWEST_NICE:
        nice, weight = nice - 1, weight * _WEIGHT_RATIO
    return nice


_PROGRAM = os.path.join(os.path.dirname(__file__), "guardian")
_MAX_PAYLOAD = 8 << 20
_LOOK_S = 0.005
_HEADER = struct.Struct("=II")
_SPAWN = struct.Struct("=IIII")
_SIGNAL = struct.Struct("=II")
_FENCE = struct.Struct("=qQ")
_REPORT = struct.Struct("=6q")
_FORK, _DIRECTORY, _EXEC, _AFFINITY = range(1, 5)
_STAGES = {
    _FORK: "make a process",
    _DIRECTORY: "enter the working directory",
    _EXEC: "run",
    _AFFINITY: "bind it to its CPUs",
}
_CLD_EXITED, _CLD_DUMPED = 1, 3
_KIND_SPAWN, _KIND_SIGNAL, _KIND_END, _KIND_FENCE, _KIND_PAUSE, _KIND_RESUME = range(1, 7)
_KIND_TEMPLATE = 7


class ReportKind(IntEnum):
    """The kinds of the guardian's reports; protocol.h says what their fields mean for each."""

    STARTED = 1
    EXITED = 2
    SPAWN_FAILED = 3
    UNKILLABLE = 4
    ENDED = 5
    FENCED = 6
    STOPPED = 7
    CONTINUED = 8
    LATE = 9


class GuardianLostError(HostError):
    """The guardian process has died, and every worker with it."""


class GuardianReport(Record):
    """One event below the guardian."""

    kind: ReportKind
    worker: int
    pid: int
    code: int
    status: int
    time_s: float

    def end_of(self, *, rank: int, local_rank: int, program: str) -> WorkerExit:
        """The end of a worker (EXITED, SPAWN_FAILED), which ran that program, or was to."""
        has_run = self.kind is not ReportKind.SPAWN_FAILED
        has_code = has_run and self.code == _CLD_EXITED
        return WorkerExit(
            rank=rank,
            local_rank=local_rank,
            pid=self.pid,
            time_s=self.time_s,
            code=self.status if has_code else None,
            signal=self.status if has_run and not has_code else None,
            core_dumped=has_run and self.code == _CLD_DUMPED,
            start_error=None if has_run else _start_error(self, program),
        )


def _start_error(report: GuardianReport, program: str) -> str:
    if report.code == _FORK and report.status in (errno.EAGAIN, errno.EMFILE, errno.ENOMEM):
        from rallypoint.base.refusals import refused

        return str(refused("fork", report.status, who="the launcher")).rstrip(".")
    what = _STAGES.get(report.code, "start")
    if report.code == _EXEC:
        what = f"{what} {program!r}"
    return f"cannot {what}: {os.strerror(report.status)}"


def _spawn_payload(
    worker: int,
    argv: Sequence[str],
    environ: Mapping[str, str],
    record_slot: int,
    directory: str,
    cpus: Collection[int],
) -> bytes:
    cpu_list = ",".join(map(str, sorted(cpus)))
    strings = [os.fsencode(directory), cpu_list.encode(), *map(os.fsencode, argv)]
    strings += [os.fsencode(f"{name}={value}") for name, value in environ.items()]
    text = b"\0".join(strings) + b"\0"
    if text.count(b"\0") != len(strings):
        raise InvalidArgumentError(
            "the worker's command line or environment holds a NUL character; remove it."
        )
    payload = _SPAWN.pack(worker, record_slot, len(argv), len(environ)) + text
    if len(payload) > _MAX_PAYLOAD:
        raise InvalidArgumentError(
            f"the worker's command line and environment take {len(payload)} bytes, more than "
            "Linux can pass to a program; pass large data in a file."
        )
    return payload


class Guardian:
    """A running guardian.

    Register `fileno()` for reading, and for writing while it `has_unsent`; then `read()`.
    """

    def __init__(self, *, temporary_directory: str = "", sessions: str = "0:one") -> None:
        """Start it; when it ends, it also removes the temporary directory (an absolute path).

        `sessions` is from `choose_sessions`: in which sessions the workers live.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            argv = ["rallypoint-guardian", str(theirs.fileno()), str(os.getpid())]
            argv += [temporary_directory, sessions]
            try:
                self.pid = os.posix_spawn(_PROGRAM, argv, {})
            except OSError as error:
                ours.close()
                from rallypoint.base.refusals import refusal_in  # only when something went wrong

                raise refusal_in(error, who="the launcher") or HostError(
                    f"cannot start the guardian {_PROGRAM}: {error.strerror};"
                    " install the package again (pip install --force-reinstall rallypoint)."
                ) from None
        self._socket = ours
        self._partial = b""
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()  # with our own descriptors

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
        record_slot: int = 0,
        directory: str = "",
        cpus: Collection[int] = (),
    ) -> None:
        """Ask for a worker.

        `descriptors` become its stdin, stdout, stderr, control socket, and flight record's memory,
        where its own is at that slot. It may run only on `cpus`, if any are given. If there is a
        template, that forks it, unless a directory is given.
        """
        payload = _spawn_payload(worker, argv, environ, record_slot, directory, cpus)
        self._send(_KIND_SPAWN, payload, descriptors)

    def template(
        self,
        worker: int,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        descriptors: tuple[int, int, int, int],
        cpus: Collection[int] = (),
    ) -> None:
        """Ask for the process that forks workers from then on, until it ends (base/template.py).

        It is told of as a worker. `descriptors` are as a worker's, without a record.
        """
        payload = _spawn_payload(worker, argv, environ, 0, "", cpus)
        self._send(_KIND_TEMPLATE, payload, (*descriptors, descriptors[0]))

    def signal(self, worker: int, signal: int) -> None:
        """Send `signal` to the worker's process group, if the worker is still running."""
        self._send(_KIND_SIGNAL, _SIGNAL.pack(worker, signal))

    def end(self) -> None:
        """Kill and reap everything; the reports end with ENDED."""
        self._send(_KIND_END, b"")

    def fence(self, until_s: float | None, *, pauses: bool = False) -> None:
        """Let all run until that time (CLOCK_BOOTTIME), or a later call's; None: without limit.

        Afterwards everything is killed, or paused until `resume`, and FENCED reported before that.
        """
        until_ns = 0 if until_s is None else int(until_s * 1e9)
        self._send(_KIND_FENCE, _FENCE.pack(until_ns, pauses))

    def pause(self) -> None:
        """Stop all processes (SIGSTOP), again if others have resumed them."""
        self._send(_KIND_PAUSE, b"")

    def resume(self) -> None:
        """Let them continue."""
        self._send(_KIND_RESUME, b"")

    @property
    def has_unsent(self) -> bool:
        """Whether requests are queued until the guardian reads."""
        return bool(self._unsent)

    def read(self, *, wait: bool = True) -> list[GuardianReport]:
        """The next reports, in the order of the events; also sends queued requests.

        If there is none, it waits for one, or returns none.
        """
        self._send_queued()
        while wait and self._unsent and not self._wait_for(select.POLLIN | select.POLLOUT):
            self._send_queued()
        try:
            got = self._socket.recv(_REPORT.size * 256, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except ConnectionError:
            got = b""
        if not got:
            raise GuardianLostError("the guardian process died; all workers died with it.")
        data = self._partial + got
        whole = len(data) // _REPORT.size * _REPORT.size
        self._partial = data[whole:]
        return [
            GuardianReport(ReportKind(kind), worker, pid, code, status, time_ns / 1e9)
            for kind, worker, pid, code, status, time_ns in _REPORT.iter_unpack(data[:whole])
        ]

    def close(self, wait_s: float = 8.0) -> None:
        """Make the guardian end and kill what is left; if it takes too long, kill it."""
        self._socket.close()
        self._drop_unsent()
        try:
            if not self._wait_for_end(wait_s):
                os.kill(self.pid, signal.SIGKILL)
                self._wait_for_end(1.0)
            os.waitpid(self.pid, os.WNOHANG)
        except (ChildProcessError, ProcessLookupError):  # someone else has reaped it
            return

    def _wait_for_end(self, wait_s: float) -> bool:
        """Whether it has ended within this time."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except (OSError, AttributeError):  # docs/support.md
            return self._is_reaped_within(wait_s)
        try:
            poll = select.poll()  # unlike select, for any number of a descriptor
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(wait_s * 1000))
        finally:
            os.close(pidfd)

    def _is_reaped_within(self, wait_s: float) -> bool:
        """The same without pidfds; also where no descriptor is left."""
        deadline = time.monotonic() + wait_s
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def _wait_for(self, events: int) -> bool:
        """Wait for one of these; returns whether there is something to read."""
        poll = select.poll()
        poll.register(self._socket, events)
        return any(found & ~select.POLLOUT for _, found in poll.poll())

    def _send(self, kind: int, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        data = memoryview(_HEADER.pack(len(payload), kind) + payload)
        if not self._unsent:
            whole = len(data)
            data = self._send_some(data, descriptors)
            if not data:
                return
            if len(data) < whole:  # descriptors travel with the first byte
                descriptors = ()
        self._unsent.append((data, [os.dup(fd) for fd in descriptors]))

    def _send_queued(self) -> None:
        while self._unsent:
            data, descriptors = self._unsent[0]
            left = self._send_some(data, descriptors)
            if len(left) < len(data):
                for fd in descriptors:
                    os.close(fd)
                descriptors = []
            if left:
                self._unsent[0] = (left, descriptors)
                return
            self._unsent.popleft()

    def _send_some(self, data: memoryview, descriptors: Sequence[int]) -> memoryview:
        """Send what is possible without waiting; returns the rest."""
        try:
            while data:
                if descriptors:
                    # Not socket.send_fds, which ignores its flags.
                    packed = struct.pack(f"={len(descriptors)}i", *descriptors)
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)]
                    sent = self._socket.sendmsg([data], rights, socket.MSG_DONTWAIT)
                    descriptors = ()
                else:
                    sent = self._socket.send(data, socket.MSG_DONTWAIT)
                data = data[sent:]
        except BlockingIOError:
            return data
        except OSError:
            self._drop_unsent()
            raise GuardianLostError(
                "the guardian process died; all workers died with it."
            ) from None
        return data

    def _drop_unsent(self) -> None:
        for _, descriptors in self._unsent:
            for fd in descriptors:
                os.close(fd)
        self._unsent.clear()
