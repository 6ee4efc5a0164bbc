"""What programs ask an agent through its socket, and how it answers, in lines of JSON.

    -> {"ask": "status"}                    <- {"run_id": ..., "ranks": [...]}
    -> {"ask": "look"}                      <- the same, and descriptors of the workers' records
    -> {"ask": "stop", "why": "..."}        <- {}
    -> {"ask": "others"}                    <- a line for each other node, as they come (relay.py)
    -> {"ask": "others traced", "seconds": 5}     <- the same, of their calls for that long
                                            <- {"error": "..."}

The agent never blocks: an asker that does not read its answer is dropped when others connect.
`Answers` supplies the content.
"""

from __future__ import annotations

import json
import selectors
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

Reply = Callable[[dict[str, object]], None]

_MAX_REQUEST = 64 << 10
_MOST_AT_ONCE = 16
_MAX_UNSENT = 64 << 20


class Answers(ABC):
    """The questions that an agent can be asked."""

    @abstractmethod
    def status(self) -> dict[str, object]:
        """The agent's state."""

    @abstractmethod
    def records(self) -> Sequence[int]:
        """Descriptors of its workers' records."""

    @abstractmethod
    def stop(self, why: str) -> None:
        """End the job on all nodes; `why` is reported to the user."""

    @abstractmethod
    def others(self, reply: Reply, *, trace_s: float = 0.0) -> None:
        """Ask the other nodes, and reply whenever one has answered.

        Args:
            trace_s: how long they should trace their workers; 0: they should only inspect.
        """


class Conversations:
    """The programs that are connected now."""

    def __init__(self, selector: selectors.BaseSelector, answers: Answers) -> None:
        self._selector = selector
        self._answers = answers
        self._open: list[_Conversation] = []

    def begin(self, connection: socket.socket) -> None:
        """A program has connected."""
        self._open = [each for each in self._open if each.is_open]
        if len(self._open) >= _MOST_AT_ONCE:
            self._open.pop(0).close()
        self._open.append(_Conversation(connection, self._selector, self._answers))

    def close(self) -> None:
        """Drop them all."""
        for each in self._open:
            each.close()
        self._open.clear()


class _Conversation:
    """One request and its answer."""

    def __init__(
        self, connection: socket.socket, selector: selectors.BaseSelector, answers: Answers
    ) -> None:
        self.is_open = True
        self._connection = connection
        self._selector = selector
        self._answers = answers
        self._request = b""
        self._unsent = b""
        self._is_last = True  # the answer is one line
        self._waits_to_write = False
        selector.register(connection, selectors.EVENT_READ, self._read)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._connection)
            self._connection.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(_MAX_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._request += data
        if not data or len(self._request) > _MAX_REQUEST:
            self.close()
        elif self._request.endswith(b"\n"):
            self._answer()

    def _answer(self) -> None:
        try:
            request = json.loads(self._request)
        except (ValueError, RecursionError):
            request = None
        self._request = b""
        if not isinstance(request, dict):
            return self._send({"error": "the request is not a JSON object"})
        try:
            self._perform(request)
        except Exception as error:  # no request may ever end a job
            self._send({"error": f"the agent could not answer: {error!r}"})
        return None

    def _perform(self, request: dict[str, object]) -> None:
        match request.get("ask"):
            case "status":
                self._send(self._answers.status())
            case "look":
                self._send(self._answers.status(), self._answers.records())
            case "stop":
                self._answers.stop(str(request.get("why", ""))[:200])
                self._send({})
            case "others":
                self._is_last = False
                self._answers.others(self._send)
            case "others traced":
                self._is_last = False
                self._answers.others(self._send, trace_s=float(str(request["seconds"])))
            case _:
                self._send(
                    {"error": "this agent does not know that request; it may be an older version"}
                )

    def _send(self, answer: dict[str, object], descriptors: Sequence[int] = ()) -> None:
        if not self.is_open:
            return
        self._unsent += json.dumps(answer).encode() + b"\n"
        if len(self._unsent) > _MAX_UNSENT:
            return self.close()
        if not self._waits_to_write:
            self._write(descriptors)
        return None

    def _write(self, descriptors: Sequence[int] = ()) -> None:
        try:  # descriptors go with the first bytes
            sent = socket.send_fds(self._connection, [self._unsent], list(descriptors))
        except BlockingIOError:
            sent = 0
        except OSError:
            return self.close()
        self._unsent = self._unsent[sent:]
        if not self._unsent and self._is_last:
            return self.close()
        waits = bool(self._unsent)
        if waits is not self._waits_to_write:
            self._waits_to_write = waits
            events = selectors.EVENT_WRITE if waits else selectors.EVENT_READ
            self._selector.modify(self._connection, events, self._write if waits else self._read)
        return None
