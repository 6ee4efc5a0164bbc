"""The processes of one contender: started together, told what to do, and surely ended.

They are started in a process group of their own, so that Ctrl-C reaches the contest alone. Each
connects to a socket of this crew, and if it is this user's, its process is held by a descriptor
from then on: whoever does not go when told to is killed, whatever started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.base.errors import HostError

_START_S = 120.0
_ANSWER_S = 300.0
_LEAVE_S = 5.0
_LOOK_S = 0.2  # how often to look whether those who were to connect are still there


class CrewError(HostError):
    """A contender cannot go on; the message says why."""


class Crew:
    """The processes of one contender, ready for orders.

    Args:
        command: starts all of them; the socket's name replaces the word ``SOCKET``.
        directory: to be made, for what they leave.
        begin: the first order, to all.

    Raises:
        CrewError: they did not come.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        ranks: int,
        directory: Path,
        begin: Mapping[str, Any],
    ) -> None:
        self.name = name
        self.version = ""
        self._members: list[_Member] = []
        self._log = directory / "log"
        directory.mkdir()
        address = f"rallypoint-bench-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind("\0" + address)  # no file, so no limit on the length of its path
            listener.listen(ranks)
            listener.settimeout(_LOOK_S)
            self._process = subprocess.Popen(
                [address if word == "SOCKET" else word for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environ, "TMPDIR": str(directory)},
                process_group=0,
            )
            try:
                self._gather(listener, ranks)
                answers = self.ask(begin)
            except BaseException:
                self.end()
                raise
        self._members.sort(key=lambda member: member.rank)
        if [member.rank for member in self._members] != list(range(ranks)):
            self.end()
            raise CrewError(
                f"{name}: its {ranks} processes do not find each other; each thinks it is rank "
                f"{', '.join(str(answer['rank']) for answer in answers)}"
            )
        self.version = answers[0]["version"]

    def ask(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Give all an order at once; their answers, by rank after the first.

        Raises:
            CrewError: one of them failed, ended or was silent for minutes.
        """
        line = json.dumps(order) + "\n"
        answers = []
        try:
            for member in self._members:
                member.connection.sendall(line.encode())
            for member in self._members:
                answers.append(member.read())
        except TimeoutError:
            raise CrewError(f"{self.name}: no answer within {_ANSWER_S:g} s") from None
        except (OSError, ValueError):
            raise CrewError(self._account("a process ended")) from None
        for answer in answers:
            if "error" in answer:
                raise CrewError(f"{self.name}: {answer['error']}")
        return answers

    def dismiss(self) -> None:
        """Tell all to go; whoever is busy does when it is done."""
        for member in self._members:
            with contextlib.suppress(OSError):
                member.connection.sendall(b'{"order": "stop"}\n')
            member.connection.close()

    def end(self) -> None:
        """See to it that all are gone."""
        if self._members:
            self.dismiss()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_S)
        for hint in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, hint)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LEAVE_S)
        for member in self._members:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(member.descriptor, signal.SIGKILL)
            os.close(member.descriptor)
        self._members.clear()

    def _gather(self, listener: socket.socket, ranks: int) -> None:
        deadline = time.monotonic() + _START_S
        while len(self._members) < ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    raise CrewError(self._account("it did not start")) from None
                if time.monotonic() > deadline:
                    raise CrewError(
                        self._account(f"not all processes came within {_START_S:g} s")
                    ) from None
                continue
            pid, user = _who(connection)
            if user == os.geteuid():
                self._members.append(_Member(connection, pid))
            else:
                connection.close()

    def _account(self, what: str) -> str:
        """What happened, and the end of what the processes wrote."""
        said = self._log.read_text(errors="replace").strip().splitlines()[-12:]
        return f"{self.name}: {what}" + "".join(f"\n  | {line}" for line in said)


class _Member:
    """One process: its connection, and a hold on it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.descriptor = os.pidfd_open(pid)
        self.connection = connection
        self.rank = -1
        connection.settimeout(_ANSWER_S)
        self._lines = connection.makefile("rb")

    def read(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._lines.readline())
        self.rank = answer.get("rank", self.rank)
        return answer


def _who(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user
