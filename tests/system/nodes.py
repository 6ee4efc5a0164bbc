"""Jobs of several agents, on test hosts or on this machine, and what their workers say."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.hosts import Host, Hosts
from tests.system import everyday
from tests.system.conftest import Launch, LeftBehindError

# Each worker says who it is, in a file, and works until there is a file "go".
WORKER = """
import datetime, os, time
from rallypoint.store.client import TCPStore
e = os.environ
store = TCPStore(e["MASTER_ADDR"], int(e["MASTER_PORT"]), timeout=datetime.timedelta(seconds=300))
number, rank, size = e["TORCHELASTIC_RESTART_COUNT"], e["RANK"], int(e["WORLD_SIZE"])
assert store.add("visits", 1) <= size  # the store is this round's own
store.set(rank, "here")
store.wait([str(other) for other in range(size)])
host = os.uname().nodename
text = f"{number} {rank}/{size} {e['GROUP_RANK']}/{e['GROUP_WORLD_SIZE']}"
name = f"up.{host}.{e['LOCAL_RANK']}"
with open(f"part.{name}", "w") as file:
    file.write(text)
os.rename(f"part.{name}", name)
while not os.path.exists("go"):
    time.sleep(0.01)
"""


@contextlib.contextmanager
def launches(directory: Path, count: int) -> Iterator[list[Launch]]:
    """So many launches on this machine, each in a directory of its own; they are ended at last."""
    found = [Launch(directory / f"node{number}") for number in range(count)]
    for launch in found:
        launch.directory.mkdir()
    try:
        yield found
    finally:
        for launch in found:
            if launch.process is not None and launch.process.poll() is None:
                launch.process.kill()
                launch.process.wait()
        for launch in found:
            launch.expect_nothing_left()


class Agents:
    """`rallypoint run` on several hosts, in one directory that all share.

    Leave it as a context: what is then left of them fails the test, and all cables are mended.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._script = directory / "worker.py"
        self._script.write_text(WORKER)
        self.flags = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host1:29400", "--rdzv-id", "j"]

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        left = {host.number: self.end_all(host.number) for host in self.hosts.hosts}
        self.hosts.repair()
        if any(left.values()):
            raise LeftBehindError(f"processes by host: {left}")

    def start(
        self,
        number: int,
        *flags: str,
        workers: int = 1,
        token: str = "secret",
        out: int | None = None,
        err: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """An agent on a host; a flag given here replaces the common one.

        What it writes goes to `output`, or to these descriptors.
        """
        words = [*self.flags, "--nproc-per-node", str(workers), *flags]
        words = [*everyday.patient(words), str(self._script)]
        command = [sys.executable, "-m", "rallypoint", "run", *words]
        with self.output(number).open("wb") as file:
            self._processes[number] = self.hosts[number].popen(
                command,
                stdout=file if out is None else out,
                stderr=file if err is None else err,
                cwd=self.directory,
                env={
                    **os.environ,
                    **({"RALLYPOINT_TOKEN": token} if token else {}),
                    "TMPDIR": str(self.directory),
                    **(environ or {}),
                },
            )

    def output(self, number: int) -> Path:
        """What the agent of a host and its workers wrote."""
        return self.directory / f"output.{number}"

    def said(self, number: int) -> str:
        return self.output(number).read_text()

    def up(self) -> dict[str, str]:
        """Host and local rank -> "ROUND RANK/SIZE NODE/NODES", as its workers said at last."""
        return {
            path.name.removeprefix("up."): path.read_text() for path in self.directory.glob("up.*")
        }

    def wait_for(self, expected: dict[str, str], *, within_s: float = 60.0) -> float:
        """Until workers of these hosts have said exactly this; the seconds it took."""
        begin = time.monotonic()
        while True:
            found = self.up()
            if all(found.get(name) == text for name, text in expected.items()):
                return time.monotonic() - begin
            assert time.monotonic() - begin < within_s, (found, self.story())
            time.sleep(0.01)

    def wait_for_size(self, numbers: Iterable[int], *, after: int = -1) -> int:
        """Until the first workers of exactly these hosts make up a round newer than `after`.

        Whatever their ranks are; returns the round's number. Each host has one worker.
        """
        hosts = sorted(numbers)
        places = sorted(f"{rank}/{len(hosts)}" for rank in range(len(hosts)))

        def newest() -> int:
            up = self.up()
            said = [up.get(f"host{number}.0", "-1 ? ?").split() for number in hosts]
            rounds = {int(words[0]) for words in said}
            is_one = len(rounds) == 1 and sorted(words[2] for words in said) == places
            return rounds.pop() if is_one else -1

        deadline = time.monotonic() + everyday.LEAST_BOUND_S
        while (number := newest()) <= after:
            assert time.monotonic() < deadline, (self.up(), self.story())
            time.sleep(0.02)
        return number

    def wait_until_said(self, number: int, text: str, *, within_s: float = 60.0) -> None:
        """Until the agent of a host has written this."""
        deadline = time.monotonic() + within_s
        while text not in self.said(number):
            assert time.monotonic() < deadline, (text, self.story())
            time.sleep(0.02)

    def finish(self, numbers: Iterable[int], *, within_s: float = 60.0) -> None:
        """Let the workers end, and expect success of these agents."""
        (self.directory / "go").touch()
        for number in numbers:
            assert self.ended(number, within_s=within_s) == 0, self.story()

    def ended(self, number: int, *, within_s: float = 60.0) -> int:
        """The exit status of an agent, once there is one."""
        try:
            return self._processes[number].wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"agent {number} still runs\n{self.story()}") from None

    def runs(self, number: int) -> bool:
        return self._processes[number].poll() is None

    def pid(self, number: int) -> int:
        """Of the agent itself, not of nsenter, which started it."""
        (pid,) = children(self._processes[number].pid)
        return pid

    def send(self, number: int, signal_number: signal.Signals) -> None:
        """A signal to the agent."""
        nsenter = self._processes[number].pid
        os.kill(self.pid(number), signal_number)
        if signal_number == signal.SIGCONT:
            os.kill(nsenter, signal.SIGCONT)  # it stops with its child

    def kill_worker(self, number: int) -> None:
        """With -9, the first worker of a host: a child of the guardian, a child of the agent."""
        (agent,) = children(self._processes[number].pid)
        (guardian,) = children(agent)
        os.kill(children(guardian)[0], signal.SIGKILL)

    def end_all(self, number: int) -> list[int]:
        """End the agent of a host; what else is left there after a while."""
        process = self._processes.get(number)
        if process is not None and process.poll() is None:
            for pid in children(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.send_signal(signal.SIGCONT)
            process.wait()
        deadline = time.monotonic() + 60
        while left := alive_on(self.hosts[number]):
            if time.monotonic() > deadline:
                return left
            time.sleep(0.02)
        return []

    def story(self) -> str:
        """All that agents and workers wrote."""
        outputs = sorted(self.directory.glob("output.*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in outputs)


def alive_on(host: Host) -> list[int]:
    """All processes of a host but its first."""
    found: list[int] = []
    try:
        its = Path(f"/proc/{host.pid}/ns/pid").stat().st_ino
    except FileNotFoundError:  # the host was killed
        return found
    for path in Path("/proc").glob("[0-9]*/ns/pid"):
        pid = int(path.parts[2])
        with contextlib.suppress(OSError):  # it is gone
            if path.stat().st_ino == its and pid != host.pid and not is_zombie(pid):
                found.append(pid)
    return found


def is_zombie(pid: int) -> bool:
    """Or gone; the first process of a test host reaps nobody."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
