"""The connection to our program on another host: orders are sent there, answers come back.

One JSON object per line; each order has one answer. remote_shell.py starts the program. Its first
line is a greeting, and it ends when its input or output is closed.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.base.errors import HostError
from rallypoint.cluster.remote_shell import CONNECT_S, end, last_lines, read_greeting, start


class OrderLink:
    """The connection to one host.

    Attributes:
        found: the contents of its greeting.

    Raises:
        HostError: the command does not exist here.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.found: dict[str, Any] = {}
        self._log = log
        self._command = command
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rb", buffering=0)
        with theirs, log.open("wb") as errors:
            try:
                their = theirs.fileno()
                self._process = start(name, command, stdin=their, stdout=their, stderr=errors)
            except HostError:
                self._socket.close()
                raise

    def fileno(self) -> int:
        """A descriptor that is readable when an answer has arrived."""
        return self._socket.fileno()

    def greet(self, word: str) -> None:
        """Wait until the program has started and sent a greeting that begins with `word`.

        Raises:
            HostError: it did not.
        """
        found = None
        while found is None:
            found = read_greeting(word, self._line(CONNECT_S))
        self.found = found

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send an order."""
        with contextlib.suppress(OSError):  # reported when the answer is read
            self._socket.sendall((json.dumps(order) + "\n").encode())

    def read(self, wait_s: float = CONNECT_S) -> dict[str, Any]:
        """Read the next answer.

        Raises:
            HostError: no answer came.
        """
        answer: dict[str, Any] = json.loads(self._line(wait_s))
        return answer

    def close(self) -> None:
        """Close its input, so that it ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self, until: float) -> None:
        """Make sure that it ends by that time."""
        end(self._process, max(until, time.monotonic() + 0.1))
        self._lines.close()
        self._socket.close()

    def _line(self, wait_s: float) -> bytes:
        try:
            self._socket.settimeout(wait_s)
            line: bytes = self._lines.readline()
        except TimeoutError:
            raise HostError(self._account(f"no answer within {wait_s:g} s")) from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # its last output
            raise HostError(self._account("the connection ended"))
        return line

    def _account(self, what: str) -> str:
        """The event, and what the host said."""
        said = last_lines(self._log.read_text(errors="replace"))
        told = "".join(f"\n  | {line}" for line in said)
        return f"{self.name}: {what}: {' '.join(self._command)}{told}"
