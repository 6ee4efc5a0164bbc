"""Queries the agents that entries.py has found; for programs, which may block."""

from __future__ import annotations

import array
import json
import socket
import time
from collections.abc import Iterator, Mapping

from rallypoint.base.errors import ControlMessageError, HostError
from rallypoint.base.json_records import from_json
from rallypoint.launch.inspection.entries import Found
from rallypoint.launch.inspection.requests import AgentStatus

_CHUNK = 1 << 16
_MAX_ANSWER = 64 << 20
_MOST_DESCRIPTORS = 4


class NoAnswerError(HostError):
    """The agent did not answer in time, or has just ended.

    Attributes:
        is_gone: it has ended.
    """

    def __init__(self, message: str, *, is_gone: bool) -> None:
        super().__init__(message)
        self.is_gone = is_gone


class AgentConnection:
    """A connection to an agent, for one request, or several if it keeps it open; to be closed.

    Args:
        name: the agent's name in errors.

    Attributes:
        has_ended: no more data will come.
    """

    def __init__(self, connection: socket.socket, name: str, *, timeout_s: float = 2.0) -> None:
        self.has_ended = False
        self._connection = connection
        self._name = name
        self._timeout_s = timeout_s
        self._data = b""
        self._descriptors = array.array("i")

    @classmethod
    def at(cls, agent: Found, *, timeout_s: float = 2.0) -> AgentConnection:
        """Connect to it."""
        connection = cls(socket.socket(socket.AF_UNIX), f"process {agent.pid}", timeout_s=timeout_s)
        try:
            connection._connection.settimeout(timeout_s)
            agent.connect(connection._connection)
        except OSError as error:
            connection.close()
            raise connection._no_answer(error) from None
        return connection

    def __enter__(self) -> AgentConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """To wait for what comes."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def ask(self, request: dict[str, object]) -> tuple[dict[str, object], list[int]]:
        """The answer, and the descriptors sent with it, which become the caller's."""
        self.send(request)
        answer = self._next(time.monotonic() + self._timeout_s)
        descriptors, self._descriptors = list(self._descriptors), array.array("i")
        return answer, descriptors

    def send(self, request: dict[str, object]) -> None:
        """Request an answer of several lines."""
        self.send_line(json.dumps(request))

    def send_line(self, line: str) -> None:
        """Send a line of text."""
        try:
            self._connection.settimeout(self._timeout_s)
            self._connection.sendall(line.encode() + b"\n")
        except OSError as error:
            raise self._no_answer(error) from None

    def lines(self, until: float) -> Iterator[dict[str, object]]:
        """The lines that come until then (time.monotonic), or until the end."""
        while True:
            try:
                yield self._next(until)
            except NoAnswerError:
                return

    def _next(self, deadline: float) -> dict[str, object]:
        while b"\n" not in self._data:
            try:
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
                part, new, _, _ = socket.recv_fds(self._connection, _CHUNK, _MOST_DESCRIPTORS)
            except OSError as error:
                raise self._no_answer(error) from None
            self._descriptors.extend(new)
            if not part or len(self._data) > _MAX_ANSWER:
                raise self._no_answer(None)
            self._data += part
        line, _, self._data = self._data.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise HostError(f"the agent ({self._name}) gave an invalid answer.")
        if "error" in answer:
            raise HostError(f"the agent ({self._name}) refused the request: {answer['error']}.")
        return answer

    def _no_answer(self, error: OSError | None) -> NoAnswerError:
        if isinstance(error, TimeoutError | BlockingIOError):
            text = f"has not answered for {self._timeout_s:g} s; it may be stopped or stuck."
            return NoAnswerError(f"the agent ({self._name}) {text}", is_gone=False)
        self.has_ended = True
        return NoAnswerError(f"the agent ({self._name}) has just ended.", is_gone=True)


def ask(agent: Found, request: dict[str, object], *, timeout_s: float = 2.0) -> dict[str, object]:
    """The answer of an agent, or an error of `AgentConnection`."""
    with AgentConnection.at(agent, timeout_s=timeout_s) as connection:
        return connection.ask(request)[0]


def ask_status(agent: Found, *, timeout_s: float = 2.0) -> AgentStatus:
    """Ask an agent for its status; errors are those of `AgentConnection` and `read_status`."""
    return read_status(ask(agent, {"ask": "status"}, timeout_s=timeout_s))


def read_status(answer: Mapping[str, object]) -> AgentStatus:
    """Read an answer to "status" or "look"."""
    try:
        return from_json(AgentStatus, answer)
    except ControlMessageError:
        raise HostError(
            "the agent's answer is invalid; the agent may run another version of rallypoint: "
            "use the command of that version."
        ) from None
