"""The processes of one contender on one host: ordered together, and reliably ended.

They are started in their own process group, so that Ctrl-C reaches only the contest. Each
connects to a socket of this crew. If it belongs to this user, a descriptor (pidfd) then holds its
process: a process that does not exit when asked is killed, whatever started it.

`LocalStarter` starts contenders on this machine alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.base.errors import HostError
from rallypoint.base.process_end import ProcessEnd
from rallypoint.lab.bench.contenders import Environments, Setting, contender
from rallypoint.launch.inspection.entries import peer_of

START_S = 120.0
ANSWER_S = 300.0
_LEAVE_S = 5.0
_LOOK_S = 0.2  # how often to check that the expected processes are still there


class CrewError(HostError):
    """A contender failed; the message says why."""


def new_address() -> str:
    """A new name for the socket of a crew, the same on all hosts."""
    return f"rallypoint-bench-{secrets.token_hex(8)}"


class Crew:
    """The processes of one contender on this host, which may connect from now on.

    Args:
        ranks: their number.
        address: the name of the socket to which they connect.
        directory: to be created, for the files that they leave.
    """

    def __init__(self, name: str, *, ranks: int, address: str, directory: Path) -> None:
        self.name = name
        self.version = ""
        self._ranks = ranks
        self._members: list[_Member] = []
        self._directory = directory
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir()
        self._log.touch()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + address)  # no file, so no limit on the length of its path
        self._listener.listen(ranks)
        self._listener.settimeout(_LOOK_S)

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], begin: Mapping[str, object]
    ) -> list[dict[str, Any]]:
        """Start them and give them their first order; returns their answers.

        Args:
            command: starts all of them; empty if another host starts them.
        """
        if command:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environ, "TMPDIR": str(self._directory)},
                    process_group=0,
                )
        self._gather()
        answers = self.ask(begin)
        self._members.sort(key=lambda member: member.rank)
        return answers

    def ask(self, order: Mapping[str, object]) -> list[dict[str, Any]]:
        """Send an order to all at once; returns their answers, by rank after the first time."""
        line = json.dumps(order) + "\n"
        answers = []
        try:
            for member in self._members:
                member.connection.sendall(line.encode())
            for member in self._members:
                answers.append(member.read())
        except TimeoutError:
            raise CrewError(f"{self.name}: no answer within {ANSWER_S:g} s") from None
        except (OSError, ValueError):
            raise CrewError(self._account("a process ended")) from None
        for answer in answers:
            if "error" in answer:
                raise CrewError(f"{self.name}: {answer['error']}")
        return answers

    def dismiss(self) -> None:
        """Tell all to leave; a busy one leaves when it has finished."""
        self._listener.close()
        for member in self._members:
            with contextlib.suppress(OSError):
                member.connection.sendall(b'{"order": "stop"}\n')
            member.close()

    def end(self) -> None:
        """Make sure that all have ended."""
        self.dismiss()
        if self._members:
            self._leaves()
        for hint in (signal.SIGTERM, signal.SIGKILL):
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, hint)
                self._leaves()
        for member in self._members:
            member.end()
        self._members.clear()

    def _leaves(self) -> None:
        """Wait a while for the process that started the others, or else for the others."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_S)
            return
        until = time.monotonic() + _LEAVE_S
        for member in self._members:
            member.await_end(until)

    def _gather(self) -> None:
        deadline = time.monotonic() + START_S
        while len(self._members) < self._ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._process is not None and self._process.poll() is not None:
                    raise CrewError(self._account("it did not start")) from None
                if time.monotonic() > deadline:
                    raise CrewError(
                        self._account(f"not all processes connected within {START_S:g} s")
                    ) from None
                continue
            pid, user = peer_of(connection)
            if user == os.geteuid():
                self._members.append(_Member(connection, pid))
            else:
                connection.close()
        self._listener.close()

    def _account(self, what: str) -> str:
        """The event, and the end of the processes' output."""
        said = self._log.read_text(errors="replace").strip().splitlines()[-12:]
        return f"{self.name}: {what}" + "".join(f"\n  | {line}" for line in said)


def check_ranks(name: str, answers: Sequence[Mapping[str, Any]]) -> None:
    """Check that the processes of a contender form one job."""
    ranks = [answer["rank"] for answer in answers]
    if sorted(ranks) != list(range(len(ranks))):
        raise CrewError(
            f"{name}: its {len(ranks)} processes did not find each other; each reports that it is "
            f"rank {', '.join(map(str, ranks))}"
        )


class _Member:
    """One process: its connection, and what reports its end."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._end = ProcessEnd(pid)
        self.connection = connection
        self.rank = -1
        connection.settimeout(ANSWER_S)
        self._lines = connection.makefile("rb")

    def read(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._lines.readline())
        self.rank = answer.get("rank", self.rank)
        return answer

    def close(self) -> None:
        """Close its connection, which it notices."""
        self._lines.close()  # it, too, holds the descriptor
        self.connection.close()

    def await_end(self, until: float) -> None:
        """Wait for its end, at most until that time."""
        self._end.wait(until - time.monotonic())

    def end(self) -> None:
        self._end.kill()
        self._end.close()


class LocalStarter:
    """Starts contenders on this machine."""

    def __init__(self, ranks: int, environments: Environments, *, pin: bool) -> None:
        self._ranks = ranks
        self._pin = pin
        self._environments = environments
        self._crews: list[Crew] = []
        self._directory = tempfile.TemporaryDirectory(prefix="rallypoint-bench-")

    def start(self, name: str, begin: Mapping[str, object]) -> Crew:
        """Start the processes of a contender."""
        setting = Setting(self._ranks, self._pin, new_address())
        crew = Crew(
            name,
            ranks=self._ranks,
            address=setting.address,
            directory=Path(self._directory.name, name),
        )
        self._crews.append(crew)
        plan = contender(name, setting, self._environments)
        answers = crew.start(plan.command, plan.environ, {**begin, "cores": cores(pin=self._pin)})
        check_ranks(name, answers)
        crew.version = answers[0]["version"]
        return crew

    def describe(self) -> str:
        """This machine, in a few words."""
        return f"{cpu()}, {len(os.sched_getaffinity(0))} cores; {self.load()}"

    def load(self) -> str:
        """How busy this machine is."""
        return f"load average {os.getloadavg()[0]:.1f}"

    def close(self) -> None:
        """End everything that was started."""
        end_all(self._crews)
        self._directory.cleanup()


def end_all(crews: list[Crew]) -> None:
    """Tell all to leave first, so that they end at the same time, and then make sure of each."""
    for crew in crews:
        crew.dismiss()
    for crew in crews:
        crew.end()


def cores(*, pin: bool) -> list[int]:
    """The core for each local rank, in turn; empty if ranks are not bound."""
    return sorted(os.sched_getaffinity(0)) if pin else []


def cpu() -> str:
    """The name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
