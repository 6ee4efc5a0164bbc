"""Starts our programs on other hosts, by ssh or by the command that --rsh names.

    ssh HOST PYTHON -m MODULE       orders go to its standard input, answers come from its output

So no port is opened and nobody else can connect; and when its input ends, for whatever reason, the
program knows that it is no longer needed. The same Python is expected at the same path on every
host. This machine needs no ssh to itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rallypoint.base.errors import HostError, InvalidArgumentError
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

    Raises:
        InvalidArgumentError: no host can have that name.
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
    """Start that command, detached from the terminal: Ctrl-C reaches only this process, which tells
    others.

    Raises:
        HostError: the command does not exist here.
    """
    try:
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0, start_new_session=True
        )
    except OSError as error:
        raise HostError(f"{host}: cannot run {command[0]} ({error.strerror})") from None


def end(process: subprocess.Popen[bytes], until: float) -> None:
    """Wait for the process that `start` started, and kill it if it still runs at `until`
    (monotonic).
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, until - time.monotonic()))
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def greeting(word: str, found: Mapping[str, object]) -> str:
    """The line by which a program reports that it has started, and what it found there."""
    import importlib.metadata

    version = importlib.metadata.version("rallypoint")
    return f"{word} {json.dumps({'version': version, **found})}\n"


def read_greeting(word: str, line: bytes) -> dict[str, Any] | None:
    """The contents of that line; None if it is another line, as a login shell may print."""
    start = word.encode()
    if not line.startswith(start):
        return None
    found: dict[str, Any] = json.loads(line[len(start) :])
    return found


def version_trouble(found: Mapping[str, Any]) -> str:
    """What is wrong with the version that a greeting names; empty if it is this one."""
    import importlib.metadata

    ours = importlib.metadata.version("rallypoint")
    if found["version"] == ours:
        return ""
    return (
        f"it has Rallypoint {found['version']}, but this machine has {ours}; install the same "
        "version on all"
    )


def last_lines(said: str) -> list[str]:
    """The last lines of that output."""
    return [line for line in said.splitlines() if line.strip()][-_LINES:]


def forwarded(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables with these prefixes: users set them here and mean them for all hosts."""
    return {name: text for name, text in environ.items() if name.startswith(prefixes)}


def _is_this_machine(name: str) -> bool:
    with contextlib.suppress(HostError):  # ssh may know the host nevertheless
        return is_here(name)
    return False
