"""Starts our programs on other hosts, by ssh or by the command that --rsh names.

    ssh HOST PYTHON -m MODULE       orders go to its standard input, answers come from its output

So no port is opened and no one else can connect; and when its input ends, for whatever reason, the
program knows that it is no longer needed. The same Python is expected at the same path on every
host. This machine needs no ssh to itself. Orders and answers are JSON objects, one to a line; each
order of an `OrderLink` has one answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.memory_file import memory_file
from rallypoint.cluster.network import is_here

# Never asks for a password, and notices within 20 s that a host does not answer.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=5")
CONNECT_S = 30.0  # limit for the first answer of the program on the host
_LINES = 12  # of a host's last output, in an error


def is_host_name(text: str) -> bool:
    """Whether it can name a host, perhaps with `user@` before it.

    ssh takes a word that begins with a dash as an option, and some options run commands.
    """
    user, at, host = text.rpartition("@")
    parts = (user, host) if at else (host,)
    return all(part and part[0] != "-" and part.isprintable() for part in parts) and " " not in text


def command_on(host: str, rsh: Sequence[str], module: str) -> list[str]:
    """The command that runs a module on a host.

    Args:
        host: its name; may begin with `user@`.
        rsh: a command that starts another on a host; the host's name is appended to it, or replaces
            ``{host}``.
    """
    if not is_host_name(host):
        raise InvalidArgumentError(f"{host!r} is not a host.")
    # -P: do not import from the directory in which this starts.
    program = [sys.executable, "-P", "-m", module]
    if _is_this_machine(host):
        return program
    if any("{host}" in word for word in rsh):
        return [*(word.replace("{host}", host) for word in rsh), *program]
    return [*rsh, host, *program]


def start(
    host: str, command: Sequence[str], *, stdin: int, stdout: int, stderr: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start that command, detached from the terminal: Ctrl-C reaches only this process."""
    try:
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0, start_new_session=True
        )
    except OSError as error:
        raise HostError(f"{host}: cannot run {command[0]} ({error.strerror})") from None


def end(process: subprocess.Popen[bytes], until: float) -> None:
    """Wait for such a process, and kill it if it still runs at `until` (monotonic)."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, until - time.monotonic()))
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def greeting(word: str, found: Mapping[str, object]) -> str:
    """The line by which a program reports that it has started, and what it found there."""
    return f"{word} {json.dumps({'version': _version(), **found})}\n"


def read_greeting(word: str, line: bytes) -> dict[str, Any] | None:
    """The contents of that line; None if it is another line, as a login shell may print."""
    start = word.encode()
    if not line.startswith(start):
        return None
    found: dict[str, Any] = json.loads(line[len(start) :])
    return found


def version_trouble(found: Mapping[str, Any]) -> str:
    """What is wrong with the version that a greeting names; empty if it is this one."""
    if found["version"] == _version():
        return ""
    return (
        f"it has Rallypoint {found['version']}, but this machine has {_version()}; install the same"
        " version on all"
    )


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("rallypoint")


def last_lines(said: str) -> list[str]:
    """The last lines of that output."""
    return [line for line in said.splitlines() if line.strip()][-_LINES:]


def forwarded(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables with these prefixes: users set them here and mean them for all hosts."""
    return {name: text for name, text in environ.items() if name.startswith(prefixes)}


class OrderLink:
    """A connection, which `end` closes, to a program on a host that carries out orders."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name = name
        self._socket = connection
        self._lines = connection.makefile("rb")

    def fileno(self) -> int:
        """A descriptor that is readable when an answer has arrived."""
        return self._socket.fileno()

    def ask(self, order: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        """Send an order; returns the answer."""
        self._socket.settimeout(wait_s)
        self.tell(order)
        return self.read(wait_s)

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send an order."""
        with contextlib.suppress(OSError):  # reported when the answer is read
            send_line(self._socket, order)

    def read(self, wait_s: float = CONNECT_S) -> dict[str, Any]:
        """Read the next answer."""
        try:
            answer: dict[str, Any] = json.loads(self._line(wait_s))
        except ValueError:
            raise HostError(self._account(None)) from None
        return answer

    def close(self) -> None:
        """Close the program's input, so that it ends. Does not wait."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self, until: float) -> None:
        """Make sure that it ends by that time, as far as it was started here."""
        del until
        self._lines.close()
        self._socket.close()

    def _line(self, wait_s: float) -> bytes:
        try:
            self._socket.settimeout(wait_s)
            line: bytes = self._lines.readline()
        except TimeoutError:
            raise HostError(self._account(wait_s)) from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise HostError(self._account(None))
        return line

    def _account(self, wait_s: float | None) -> str:
        """The event: no answer within that time; None: the connection ended."""
        return "the connection ended" if wait_s is None else "no reply in time"


class ShellLink(OrderLink):
    """The connection to a program that a command starts, as ssh on a host.

    `found` is what its greeting says. `name` is what others call the host, if not as the command.
    """

    def __init__(self, host: str, command: Sequence[str], name: str = "") -> None:
        self.found: dict[str, Any] = {}
        self._host = host
        self._command = command
        ours, theirs = socket.socketpair()
        # That needs no disk, which may be full, and leaves no file behind.
        self._log = memory_file("rallypoint-log")
        with theirs:
            try:
                their = theirs.fileno()
                self._process = start(host, command, stdin=their, stdout=their, stderr=self._log)
            except HostError:
                ours.close()
                os.close(self._log)
                raise
        super().__init__(name or host, ours)

    def greet(self, word: str) -> None:
        """Wait until the program has started and sent a greeting that begins with `word`."""
        found = None
        while found is None:
            found = read_greeting(word, self._line(CONNECT_S))
        self.found = found

    def end(self, until: float) -> None:
        end(self._process, max(until, time.monotonic() + 0.1))
        super().end(until)
        os.close(self._log)

    def _account(self, wait_s: float | None) -> str:
        """The event, and what the host said."""
        if wait_s is None:
            what = "the connection ended"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # its last output
        else:
            what = f"no answer within {wait_s:g} s"
        said = os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace")
        told = "".join(f"\n  | {line}" for line in last_lines(said))
        return f"{self._host}: {what}: {' '.join(self._command)}{told}"


def send_line(connection: socket.socket, what: Mapping[str, Any]) -> None:
    """Send an order, or the answer to one."""
    connection.sendall((json.dumps(what) + "\n").encode())


def _is_this_machine(name: str) -> bool:
    with contextlib.suppress(HostError):  # ssh may know the host nevertheless
        return is_here(name)
    return False
