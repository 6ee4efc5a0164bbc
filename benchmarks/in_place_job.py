"""A job whose processes tell what they notice, and that is disturbed: here, or on test hosts."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from hosts import Host, Hosts

T = TypeVar("T")

PARTS = ("noticed", "told", "formed", "agreed", "synced", "good")


class Process(NamedTuple):
    """A worker, as it knows itself."""

    host: str
    pid: int


class Entry(NamedTuple):
    """What a worker told (in_place_worker.py)."""

    what: str
    at_s: float
    round: int
    rank: int
    size: int
    identity: int


class Recovery(NamedTuple):
    """What followed a loss, in seconds after it.

    Attributes:
        parts: of the survivor that was the last to go on, until the end of each part.
        whole_s: until a group of the full size had reduced; None: it was not waited for.
        is_in_place: whether the survivors have their memory still.
    """

    went_on_s: float
    parts: dict[str, float]
    whole_s: float | None
    is_in_place: bool


class StuckError(Exception):
    """The job did not go on."""


class RestartedError(StuckError):
    """The job goes on with none of the processes that outlived the loss."""


class Job:
    """Agents of one job.

    Args:
        command: of each agent, with the script; {number} is that of its host.
        size: how many ranks it has.
        worker: the script's arguments after the directory.
        hosts: where; None: one agent, here.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        *,
        worker: Sequence[str] = (),
        hosts: Hosts | None = None,
        environ: dict[str, str] | None = None,
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.directory = Path(self._scratch.name)
        self.size = size
        self._command, self._worker, self._hosts = command, worker, hosts
        self._environ = {**os.environ, **(environ or {}), "TMPDIR": str(self.directory)}
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._read: dict[Process, int] = {}
        self.entries: dict[Process, list[Entry]] = {}

    def start(self, number: int = 0) -> None:
        """The agent on this host."""
        command = [*self._command, str(self.directory), *self._worker]
        command = [each.replace("{number}", str(number)) for each in command]
        with (self.directory / f"output.{number}").open("ab") as out:
            if self._hosts is None:
                self._agents[number] = subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, env=self._environ
                )
            else:
                self._agents[number] = self._hosts[number].popen(
                    command, stdout=out, stderr=subprocess.STDOUT, env=self._environ
                )

    def close(self) -> None:
        """End it."""
        for number in list(self._agents):
            if self._hosts is not None:
                self.kill_host(number)
                continue
            agent = self._agents.pop(number)
            agent.terminate()
            try:
                agent.wait(60)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        self._scratch.cleanup()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def story(self) -> str:
        """What the agents and workers wrote."""
        outputs = sorted(self.directory.glob("output.*"))
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in outputs)

    # What the workers tell.

    def listen(self) -> None:
        """Read what is new."""
        for path in self.directory.glob("*.told"):
            host, pid = path.name.removesuffix(".told").rsplit(".", 1)
            process = Process(host, int(pid))
            with path.open() as file:
                file.seek(self._read.get(process, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[process] = self._read.get(process, 0) + len(whole)
            for line in whole.splitlines():
                what, at_s, *numbers = line.split()
                entry = Entry(what, float(at_s), *map(int, numbers))
                self.entries.setdefault(process, []).append(entry)

    def forget(self, processes: Collection[Process]) -> None:
        """These have ended, and tell nothing any more."""
        for process in processes:
            self.entries.pop(process, None)
            self._read.pop(process, None)  # others may get the same pid
            for end in ("told", "step"):
                (self.directory / f"{process.host}.{process.pid}.{end}").unlink(missing_ok=True)

    def await_size(self, since: float, size: int, patience_s: float = 60.0) -> float:
        """Until a group of that size has reduced; when the last of its ranks had.

        Raises:
            StuckError: not within `patience_s`.
        """

        def last() -> float | None:
            goods = self._goods(since)
            for number in {each.round for each in goods.values()}:
                times = [e.at_s for e in goods.values() if (e.round, e.size) == (number, size)]
                if len(times) == size:
                    return max(times)
            return None

        return self._await(last, f"{size} ranks to reduce", patience_s)

    def members(self, until: float = math.inf) -> dict[Process, Entry]:
        """The processes that took part in the newest round then, and what they had told last."""
        self.listen()
        goods = self._goods(0.0, until)
        newest = max((each.round for each in goods.values()), default=-1)
        return {key: each for key, each in goods.items() if each.round == newest}

    def recovery(
        self, since: float, lost: Collection[Process], *, whole: bool, patience_s: float = 60.0
    ) -> Recovery:
        """Until all but these processes go on.

        Raises:
            StuckError: they did not within `patience_s`.
            RestartedError: others do, in their places.
        """
        before = self.members(since)
        survivors = [each for each in before if each not in lost]

        def last() -> tuple[float, Process] | None:
            firsts = [(self._first_good(each, since), each) for each in survivors]
            if any(at_s is None for at_s, _ in firsts):
                goods = self._goods(since)
                are_all = any(each.size == len(goods) for each in goods.values())
                if are_all and not goods.keys() & before.keys():
                    after_s = min(each.at_s for each in goods.values()) - since
                    raise RestartedError(f"all ranks were started again, {after_s:.1f} s after it")
                return None
            return max((at_s, each) for at_s, each in firsts if at_s is not None)

        at_s, slowest = self._await(last, "survivors to go on", patience_s)
        told = [e for e in self.entries[slowest] if since < e.at_s <= at_s]
        parts = {}
        for what in PARTS:
            times = [each.at_s - since for each in told if each.what == what]
            if times:  # a newer round may have come before this one's next part
                parts[what] = min(times) if what == "noticed" else max(times)
        whole_s = None
        if whole:
            whole_s = self.await_size(since, self.size, patience_s) - since
        return Recovery(
            at_s - since,
            parts,
            whole_s,
            all(before[each].identity == self.entries[each][-1].identity for each in survivors),
        )

    @property
    def agent(self) -> int:
        """The pid of the only one."""
        [agent] = self._agents.values()
        return agent.pid

    def steps(self) -> int:
        """The last step that the ranks of the newest round have committed."""
        steps = [0]
        for process in self.members():
            path = self.directory / f"{process.host}.{process.pid}.step"
            steps.append(int.from_bytes(path.read_bytes(), sys.byteorder))
        return max(steps)

    def _goods(self, since: float, until: float = math.inf) -> dict[Process, Entry]:
        """The last good reduction of each process in that time."""
        found = {}
        for process, entries in self.entries.items():
            goods = [e for e in entries if e.what == "good" and since < e.at_s <= until]
            if goods:
                found[process] = goods[-1]
        return found

    def _first_good(self, process: Process, since: float) -> float | None:
        times = [e.at_s for e in self.entries[process] if e.what == "good" and e.at_s > since]
        return times[0] if times else None

    def _await(self, found: Callable[[], T | None], what: str, patience_s: float) -> T:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            self.listen()
            value = found()
            if value is not None:
                return value
            time.sleep(0.01)
        raise StuckError(f"waited {patience_s:g} s for {what}: {self.story()}")

    # What disturbs it.

    def signal(self, process: Process, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to a worker; when."""
        pid = process.pid
        if self._hosts is not None:
            [host] = [each for each in self._hosts.hosts if each.name == process.host]
            pid = processes_on(host)[process.pid]
        since = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return since

    def kill_host(self, number: int) -> float:
        """All processes of the job on a host, with -9; when it began."""
        assert self._hosts is not None
        pids = processes_on(self._hosts[number])
        since = time.monotonic()
        for inside, pid in sorted(pids.items()):
            if inside > 1:  # the first process is the host itself
                with contextlib.suppress(ProcessLookupError):  # by the death of one before it
                    os.kill(pid, signal.SIGKILL)
        self._agents.pop(number).wait()
        return since


def processes_on(host: Host) -> dict[int, int]:
    """Those of a test host: by their numbers there, those on this machine."""
    space = Path(f"/proc/{host.pid}/ns/pid").readlink()
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "ns" / "pid").readlink() == space:
                status = (path / "status").read_text()
                numbers = status.partition("NSpid:")[2].split("\n")[0].split()
                found[int(numbers[-1])] = int(path.name)
    return found
