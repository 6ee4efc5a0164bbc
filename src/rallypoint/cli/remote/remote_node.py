"""The program on each host of `rallypoint run --hosts`: it starts a launcher, which lives only as
long as this connection.

    python -P -m rallypoint.cli.remote.remote_node    started by ssh, --rsh, or a Ray actor

Orders are JSON, one to a line of standard input: where to work, what to start, then signals for it.
One line answers the first. From then on both outputs are the launcher's, except for the last line,
which begins with a secret mark and says how the launcher ended. When the input ends, for whatever
reason, the launcher is ended: it gets SIGTERM and, a second later, SIGKILL; its guardian then ends
all workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import Any

from rallypoint.base.errors import RallypointError
from rallypoint.base.port_range import VARIABLE as PORT_RANGE
from rallypoint.base.port_range import bind_free
from rallypoint.base.process_end import ProcessEnd
from rallypoint.base.ready import left_until
from rallypoint.cluster.remote_shell import greeting

GREETING = "rallypoint node"  # anything printed before it comes from a login shell
_GRACE_S = 1.0
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16


class StarterOrders:
    """Standard input, read as orders."""

    def __init__(self) -> None:
        self.is_open = True
        self._rest = b""

    def wait(self) -> dict[str, Any] | None:
        """The next order; None: there will be no more."""
        while (order := self.take()) is None and self.is_open:
            self.read()
        return order

    def read(self) -> None:
        """Read more input; waits if there is none yet."""
        try:
            data = os.read(0, _READ_BYTES)
        except OSError:
            data = b""
        self.is_open = bool(data)
        self._rest += data

    def take(self) -> dict[str, Any] | None:
        """The next complete order; None: there is none yet."""
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            return None
        self._rest = rest
        order: dict[str, Any] = json.loads(line)
        return order


def main() -> int:
    """Carry out the orders; returns the launcher's exit status."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)  # Ray has threads that block SIGINT
    orders = StarterOrders()
    order = orders.wait()
    if order is None:
        return 0
    held, answer = _look(order)
    os.write(1, greeting(GREETING, answer).encode())
    order = orders.wait()
    if order is None:
        return 0
    launcher = _start(order["words"], order["environ"])
    status = _watch(launcher, orders)
    if held is not None:
        held.close()
    with contextlib.suppress(OSError):  # the reader may have gone
        os.write(1, f"{order['mark']}{status}\n".encode())
    return status


def _look(order: dict[str, Any]) -> tuple[socket.socket | None, dict[str, object]]:
    """Check whether a launcher can work here, and at which port it may listen."""
    directory = order["directory"]
    if order["port_range"]:
        os.environ[PORT_RANGE] = order["port_range"]
    try:
        os.chdir(directory)
    except OSError as error:
        text = f"cannot work in {directory} there ({error.strerror})"
        return None, {"error": f"{text}; start the job in a directory that exists on all hosts"}
    script = order["script"]
    if script and not os.path.exists(script):
        text = f"there is no {script} in {directory} there"
        return None, {
            "error": f"{text}; start the job in a directory that has the same files on all hosts"
        }
    try:
        held = bind_free(_bind)
    except (RallypointError, OSError) as error:
        return None, {"error": f"found no free port for the rendezvous: {error}"}
    return held, {"port": held.getsockname()[1]}


def _bind(port: int) -> socket.socket:
    """Hold a port: no other program gets it, and as nothing listens there, the launcher still
    can.
    """
    is_dual = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_dual:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", port))
    except OSError:
        held.close()
        raise
    return held


def _start(words: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the launcher so that it does not outlive this process."""
    # The variables that stand for flags have already been read where the job was started.
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PET_")}
    me, libc = os.getpid(), ctypes.CDLL(None)

    def die_with_me() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os.kill(os.getpid(), signal.SIGKILL)

    return subprocess.Popen(
        [sys.executable, "-P", *words],
        stdin=subprocess.DEVNULL,
        env={**kept, **environ},
        preexec_fn=die_with_me,  # noqa: PLW1509 - there is no other thread
    )


def _watch(launcher: subprocess.Popen[bytes], orders: StarterOrders) -> int:
    """Pass on signals until the launcher has ended; returns its exit status."""

    def pass_on(number: int, _: FrameType | None) -> None:
        launcher.send_signal(number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    ended = ProcessEnd(launcher.pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(0, select.POLLIN)
    is_wanted = True
    kill_at: float | None = None
    while True:
        while (order := orders.take()) is not None:
            launcher.send_signal(order["signal"])
        if is_wanted and not orders.is_open:
            is_wanted = False
            poll.unregister(0)
            launcher.send_signal(signal.SIGTERM)
            kill_at = time.monotonic() + _GRACE_S
        left_s = left_until(kill_at)
        ready = [fd for fd, _ in poll.poll(None if left_s is None else left_s * 1000)]
        if ended.fileno() in ready:
            status = launcher.wait()
            return status if status >= 0 else 128 - status
        if 0 in ready:
            orders.read()
        if not ready and kill_at is not None:
            launcher.kill()
            kill_at = None


if __name__ == "__main__":
    sys.exit(main())
