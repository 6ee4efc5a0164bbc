"""What runs as an actor on a node: it starts node.py, and carries its input and outputs.

Ray calls its methods; `read` waits, so it and the orders each need a thread of their own. When the
actor ends, however it does, so does the input of node.py, which then ends its launcher. Ray leaves
an actor alone whose raylet was killed; that ends this one.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

_READ_BYTES = 64 << 10  # below what Ray sends within a reply
_THREADS = "OMP_NUM_THREADS"
_RAYLET = "RAY_RAYLET_PID"
_DEBUGGER = "PYTHONBREAKPOINT"


class Shell:
    """One program on this node, and its three streams."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._poll = select.poll()
        self._raylet = -1
        # By descriptor, what is read: 0 stdout, 1 stderr.
        self._open: dict[int, tuple[int, IO[bytes]]] = {}

    def look(self) -> str:
        """The directory that Ray has this work in."""
        return os.getcwd()

    def start(self, module: str) -> None:
        """Start that module of ours."""
        with open("/proc/self/environ", "rb") as file:
            given = {os.fsdecode(word.partition(b"=")[0]) for word in file.read().split(b"\0")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=without_ray(os.environ, given),
            bufsize=0,
            start_new_session=True,
        )
        for number, stream in enumerate((self._process.stdout, self._process.stderr)):
            assert stream is not None
            self._open[stream.fileno()] = (number, stream)
            self._poll.register(stream.fileno(), select.POLLIN)
        with contextlib.suppress(OSError, ValueError):  # it cannot be seen from a container
            self._raylet = os.pidfd_open(int(os.environ.get(_RAYLET, "")))
            self._poll.register(self._raylet, select.POLLIN)

    def write(self, data: bytes) -> None:
        """To its input, whole."""
        while data:
            data = data[os.write(self._stdin.fileno(), data) :]

    def end_input(self) -> None:
        """It then ends by itself."""
        self._stdin.close()

    def read(self) -> tuple[bytes, bytes]:
        """What it wrote to stdout and stderr; waits for something. Twice nothing: it has ended."""
        found = [b"", b""]
        while self._open and not any(found):
            for fd, _ in self._poll.poll():
                if fd == self._raylet:
                    os._exit(1)
                data = os.read(fd, _READ_BYTES)
                number, stream = self._open[fd]
                found[number] = data
                if not data:
                    self._poll.unregister(fd)
                    del self._open[fd]
                    stream.close()
        if not any(found) and self._process is not None:
            self._process.wait()
        return found[0], found[1]

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin


def without_ray(environ: Mapping[str, str], given: set[str]) -> dict[str, str]:
    """The environment without what Ray sets for programs of its own.

    Args:
        environ: of an actor's process.
        given: the variables that it was started with.
    """
    kept = dict(environ)
    if _THREADS not in given:  # by the CPUs of the actor, which are those of all workers
        kept.pop(_THREADS, None)
    if kept.get(_DEBUGGER, "").startswith("ray."):
        del kept[_DEBUGGER]
    return kept
