"""The program on each host of `rallypoint bench --hosts`: it starts each contender's processes
there and passes orders on to them.

    python -m rallypoint.lab.bench.host       started by ssh, or by what --rsh names

Orders are read from standard input and answers written to standard output, as JSON, one to a line;
each order has one answer. When the input ends, for whatever reason, everything that was started
here is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rallypoint.base.errors import HostError
from rallypoint.cluster.remote_shell import greeting
from rallypoint.lab.bench.contenders import Environments, Setting, check, contender, default_cache
from rallypoint.lab.bench.crew import Crew, cores, cpu, end_all

GREETING = "rallypoint bench"  # anything printed before it comes from a login shell
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class OrderRunner:
    """Carries out orders."""

    def __init__(self, directory: Path) -> None:
        self.crews: dict[str, Crew] = {}
        self._directory = directory
        self._environments = Environments({}, default_cache(), make=False)

    def begin(self, *, environ: dict[str, str], ranks: int, pin: bool, mpi: dict[str, str],
              make: bool, contenders: list[str]) -> dict[str, object]:  # fmt: skip
        """Take what is the same for all contenders; answers whether they are installed."""
        os.environ.update(environ)
        self._ranks, self._pin = ranks, pin
        named = {name: Path(prefix) for name, prefix in mpi.items()}
        self._environments = Environments(named, default_cache(), make=make)
        for name in contenders:
            check(name, self._environments)
        return {}

    def open(self, *, crew: str, address: str) -> dict[str, object]:
        """Let a contender's processes connect from now on; answers with a free port."""
        self.crews[crew] = Crew(
            crew, ranks=self._ranks, address=address, directory=self._directory / crew
        )
        with socket.create_server(("", 0)) as server:
            return {"port": server.getsockname()[1]}

    def start(self, *, crew: str, address: str, hosts: list[str], node: int, port: int,
              rsh: list[str], begin: dict[str, object]) -> dict[str, object]:  # fmt: skip
        """Start them; returns their answers."""
        setting = Setting(
            self._ranks, self._pin, address, tuple(hosts), node, port, self._remote_shell(rsh)
        )
        plan = contender(crew, setting, self._environments)
        order = {**begin, "cores": cores(pin=self._pin)}
        return {"answers": self.crews[crew].start(plan.command, plan.environ, order)}

    def ask(self, *, crew: str, order: dict[str, object]) -> dict[str, object]:
        """Pass on an order; returns their answers."""
        return {"answers": self.crews[crew].ask(order)}

    def end(self, *, crew: str) -> dict[str, object]:
        """Make sure that all of them have ended."""
        self.crews.pop(crew).end()
        return {}

    def _remote_shell(self, words: list[str]) -> str:
        """The remote shell as a program of one word, for libraries that accept only that."""
        path = self._directory / "rsh"
        text = shlex.join(words)
        if "{host}" in text:
            text = text.replace("{host}", """'"$host"'""")
            path.write_text(f'#!/bin/sh\nhost=$1; shift\nexec {text} "$@"\n')
        else:
            path.write_text(f'#!/bin/sh\nexec {text} "$@"\n')
        path.chmod(0o700)
        return str(path)


def main() -> None:
    """Carry out orders until the input ends."""
    for number in _ENDS:
        signal.signal(number, _ended)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="rallypoint-bench-") as directory:
        host = OrderRunner(Path(directory))
        try:
            _obey(host, lines)
        finally:
            end_all(list(host.crews.values()))


def _obey(host: OrderRunner, lines: queue.SimpleQueue[str]) -> NoReturn:
    found = {"cpu": cpu(), "cores": str(len(os.sched_getaffinity(0)))}
    print(greeting(GREETING, found), end="", flush=True)
    while True:
        order = json.loads(lines.get())
        try:
            answer: dict[str, object] = getattr(host, order.pop("do"))(**order)
        except HostError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def _read(lines: queue.SimpleQueue[str]) -> None:
    with contextlib.suppress(OSError):  # raised if the other end left an answer unread
        for line in sys.stdin:
            lines.put(line)
    os.kill(os.getpid(), signal.SIGTERM)  # the main thread may be blocked anywhere


def _ended(number: int, _: FrameType | None) -> NoReturn:
    for other in _ENDS:  # a second signal must not interrupt the cleanup
        signal.signal(other, _is_ending)
    raise SystemExit(0 if number == signal.SIGTERM else 128 + number)


def _is_ending(number: int, _: FrameType | None) -> None:
    pass


if __name__ == "__main__":
    main()
