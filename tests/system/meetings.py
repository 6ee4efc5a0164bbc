"""Handlers in threads and in processes, for tests of rendezvous: each is one node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WITHIN_S = 100.0

# A node of its own process: says who it is in each round, until there is a file "go".
PROGRAM = """
import datetime, os, sys, time
from rallypoint.rendezvous import *
from rallypoint.store.client import TCPStore
from rallypoint.store.file import FileStore
name, kind, where, heartbeat_s = sys.argv[1:]
timeout = RendezvousTimeout(
    join=datetime.timedelta(seconds=30), last_call=datetime.timedelta(seconds=0.5)
)
if kind == "c10d":
    handler = get_rendezvous_handler(RendezvousParameters(
        "c10d", where, "r", 2, 3, last_call_timeout=1, join_timeout=30,
        keep_alive_interval=heartbeat_s, is_host=name == "a",
    ))
else:
    store = FileStore(where) if kind == "file" else TCPStore("127.0.0.1", int(where))
    handler = DynamicRendezvousHandler.from_backend(
        "r", store, kind, 2, 3, timeout=timeout, keep_alive_interval=float(heartbeat_s)
    )
try:
    while not os.path.exists("go"):
        info = handler.next_rendezvous()
        info.store.set(str(info.rank), name)
        names = [info.store.get(str(rank)).decode() for rank in range(info.world_size)]
        with open(f"up.{name}.new", "w") as file:
            file.write(f"{info.rank} of {' '.join(names)}")
        os.rename(f"up.{name}.new", f"up.{name}")
        while not os.path.exists("go") and not handler.num_nodes_waiting():
            time.sleep(0.02)
except RendezvousClosedError:
    assert handler.is_closed()
handler.shutdown()
"""


class Call:
    """`next_rendezvous` of one handler, in a thread."""

    def __init__(self, handler: Any) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(handler,), daemon=True)
        self._thread.start()

    def _run(self, handler: Any) -> None:
        try:
            self._result = handler.next_rendezvous()
        except BaseException as error:
            self._error = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        """What it returned; raises what it raised."""
        self._thread.join(WITHIN_S)
        assert not self.waits, "next_rendezvous did not return"
        if self._error is not None:
            raise self._error
        return self._result


def meet(*handlers: Any) -> list[Any]:
    """All of them come to the rendezvous at once; their places."""
    return [call.result() for call in [Call(handler) for handler in handlers]]


def until(condition: Callable[[], object], *, within_s: float = WITHIN_S) -> float:
    """Wait for it; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "it did not come true"
        time.sleep(0.01)
    return time.monotonic() - began


class Programs:
    """Nodes in processes of their own, in one directory."""

    def __init__(self, directory: Path, kind: str, where: str, heartbeat_s: float) -> None:
        self.directory = directory
        self._words = (kind, where, str(heartbeat_s))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        with (self.directory / f"output.{name}").open("wb") as out:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", PROGRAM, name, *self._words],
                cwd=self.directory,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RALLYPOINT_TOKEN": "secret"},
            )

    def send(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def up(self) -> dict[str, str]:
        """What each node said last: its rank, and the names of all by rank."""
        return {each.name[3:]: each.read_text() for each in self.directory.glob("up.?")}

    def wait_for(self, *names: str, within_s: float = WITHIN_S) -> float:
        """Until exactly these nodes are in one round, each with a rank of its own."""

        def are_in_one_round() -> bool:
            said = [self.up().get(name, "").split(" of ") for name in names]
            lists = {each[-1] for each in said}
            return (
                len(lists) == 1
                and sorted(lists.pop().split()) == sorted(names)
                and sorted(each[0] for each in said) == [str(i) for i in range(len(names))]
            )

        try:
            return until(are_in_one_round, within_s=within_s)
        except AssertionError:
            raise AssertionError(self.story()) from None

    def finish(self, names: Sequence[str]) -> None:
        """Let these end, and expect that they end well."""
        (self.directory / "go").touch()
        for name in names:
            assert self._processes[name].wait(WITHIN_S) == 0, self.story()

    def kill_all(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()

    def story(self) -> str:
        outputs = [each.read_text() for each in sorted(self.directory.glob("output.?"))]
        return f"{self.up()}\n" + "\n".join(outputs)
