"""Both ends of one actor: the starter's is a `Connection` to remote_node.py, which Shell starts.

    link --> stdin  --thread--> Shell.write          one call after the other, so in order
    link <-- stdout, stderr <--thread-- Shell.read   the next one when these were taken

Two threads wait for Ray, so that nothing else has to. They end with the actor, or with the link.
When the actor ends, however it ends, remote_node.py reaches the end of its input and ends its
launcher. Ray does not end an actor whose raylet was killed, so this one ends itself then.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

from rallypoint.base.process_end import ProcessEnd

_READ_BYTES = 64 << 10  # small enough that Ray sends it within a reply
_THREADS = "OMP_NUM_THREADS"
_RAYLET = "RAY_RAYLET_PID"
_DEBUGGER = "PYTHONBREAKPOINT"


class Channel:
    """See Connection.

    Args:
        actor: Ray's handle of a Shell that is running.
        ray: the ray module.
        module: the module that runs there.
    """

    def __init__(self, actor: Any, ray: Any, module: str) -> None:
        self._actor = actor
        self._ray = ray
        orders, self.stdin = os.pipe()
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        self.ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False
        self._lost = ""  # the reason why the actor cannot be reached
        self._started = self._call("orders", "start", module)
        self.threads = (
            threading.Thread(target=self._carry_orders, args=(orders,), daemon=True),
            threading.Thread(target=self._carry_output, args=(out, err), daemon=True),
        )
        for thread in self.threads:
            thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether the actor ended, rather than the program that it runs."""
        return bool(self._lost)

    def end(self) -> None:
        """See Connection."""
        self._ray.kill(self._actor)
        self._has_ended()

    def close(self) -> None:
        """See Connection."""
        with self._lock:
            self._is_closed = True
            os.close(self.ended)
        self._ray.kill(self._actor)

    def why(self, said: str) -> str:
        """See Connection."""
        if "No module named" in said:
            return "install Rallypoint there as well, for the Python that runs Ray"
        return self._lost or "the program there exited before it answered"

    def _carry_orders(self, orders: int) -> None:
        try:
            self._ray.get(self._started)
            while data := os.read(orders, _READ_BYTES):
                self._ray.get(self._call("orders", "write", data))
            self._ray.get(self._call("orders", "end_input"))
        except self._ray.exceptions.RayError:
            pass  # the other thread reports it
        finally:
            os.close(orders)

    def _carry_output(self, out: int, err: int) -> None:
        try:
            self._ray.get(self._started)
            while any(found := self._ray.get(self._call("output", "read"))):
                for fd, data in zip((out, err), found, strict=True):
                    _write(fd, data)
        except self._ray.exceptions.RayError as error:
            self._lost = first_line(error)
        except BrokenPipeError:
            pass  # the link is closed
        finally:
            os.close(out)
            os.close(err)
            self._has_ended()

    def _call(self, group: str, method: str, *arguments: object) -> Any:
        return getattr(self._actor, method).options(concurrency_group=group).remote(*arguments)

    def _has_ended(self) -> None:
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self.ended, 1)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def first_line(error: BaseException) -> str:
    """The first line of Ray's message, which may be a page long, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")


class Shell:
    """The actor: a program on its node, and the program's three streams.

    Ray calls its methods; `read` blocks, so it and the orders each need a thread of their own.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._poll = select.poll()
        self._raylet: ProcessEnd | None = None
        # By descriptor, what is read: 0 is stdout, 1 is stderr.
        self._open: dict[int, tuple[int, IO[bytes]]] = {}

    def look(self) -> str:
        """The working directory that Ray gave this actor."""
        return os.getcwd()

    def start(self, module: str) -> None:
        """Start that module of ours as a program."""
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
        with contextlib.suppress(OSError, ValueError):  # the raylet is not visible from a container
            self._raylet = ProcessEnd(int(os.environ.get(_RAYLET, "")))
            self._poll.register(self._raylet, select.POLLIN)

    def write(self, data: bytes) -> None:
        """Write all of this to the program's input."""
        while data:
            data = data[os.write(self._stdin.fileno(), data) :]

    def end_input(self) -> None:
        """Close the program's input; it then ends by itself."""
        self._stdin.close()

    def read(self) -> tuple[bytes, bytes]:
        """The program's output on stdout and stderr; waits for some. Both empty: it has ended."""
        found = [b"", b""]
        while self._open and not any(found):
            for fd, _ in self._poll.poll():
                if self._raylet is not None and fd == self._raylet.fileno():
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
    """The environment without the variables that Ray sets for its own programs.

    Args:
        environ: the environment of an actor's process.
        given: the variables with which it was started.
    """
    kept = dict(environ)
    if _THREADS not in given:  # Ray derives it from the actor's CPUs, which all workers share
        kept.pop(_THREADS, None)
    if kept.get(_DEBUGGER, "").startswith("ray."):
        del kept[_DEBUGGER]
    return kept
