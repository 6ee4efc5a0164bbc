"""Starts processes (__main__.py) that inspect for the agent, which must not block; each returns one
JSON object.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from rallypoint.launch.inspection.requests import Conversations, Finding
from rallypoint.launch.job import TOKEN

_CHUNK = 1 << 16
_MAX_BYTES = 8 << 20

Receive = Callable[[dict[str, object] | None], None]


def spawn(words: Sequence[str], *, stdin: int | None = None, stdout: int | None = None) -> int:
    """Start `python -m rallypoint.launch.inspection WORDS`; returns its process number."""
    given = ((0, stdin, os.O_RDONLY), (1, stdout, os.O_WRONLY), (2, None, os.O_WRONLY))
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-m", "rallypoint.launch.inspection", *words],
        {name: value for name, value in os.environ.items() if name != TOKEN},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, number, os.devnull, flags, 0)
            if descriptor is None
            else (os.POSIX_SPAWN_DUP2, descriptor, number)
            for number, descriptor, flags in given
        ],
    )


class Child:
    """One such process.

    Args:
        stdin: its standard input, or None.
        receive: called once with its output; None: it ended without output.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        words: Sequence[str],
        receive: Receive,
        *,
        stdin: int | None = None,
    ) -> None:
        self._selector = selector
        self._receive = receive
        self._data = b""
        self._output, their_output = os.pipe()
        os.set_blocking(self._output, False)
        try:
            self._pid = spawn(words, stdin=stdin, stdout=their_output)
        except OSError:
            os.close(self._output)
            raise
        finally:
            os.close(their_output)
        selector.register(self._output, selectors.EVENT_READ, self._read)

    def close(self) -> None:
        """End it."""
        if self._output >= 0:
            self._selector.unregister(self._output)
            os.close(self._output)
            self._output = -1
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _read(self) -> None:
        try:
            part = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return
        self._data += part
        if part and len(self._data) <= _MAX_BYTES:
            return
        self.close()
        try:
            output = json.loads(self._data)
        except (ValueError, RecursionError):
            output = None
        self._receive(output if isinstance(output, dict) else None)


class NodeInspector:
    """Has this agent's node inspected, once at a time; concurrent askers get the same answer."""

    def __init__(self, selector: selectors.BaseSelector, conversations: Conversations) -> None:
        self._selector = selector
        self._conversations = conversations
        self._replies: list[Finding] = []
        self._child: Child | None = None

    def inspect(self, reply: Finding, words: Sequence[str] = ("node",)) -> None:
        """Inspect, and reply with the findings; `words` are arguments of the process."""
        self._replies.append(reply)
        if len(self._replies) == 1:
            try:
                self._start(words)
            except OSError as error:
                self._tell(
                    {"trouble": f"cannot start the process that inspects workers: {error.strerror}"}
                )

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.close()

    def _start(self, words: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            self._child = Child(self._selector, words, self._heard, stdin=theirs.fileno())
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._conversations.begin(ours)

    def _heard(self, seen: dict[str, object] | None) -> None:
        self._tell(
            {"trouble": "the process that inspects workers ended early"} if seen is None else seen
        )

    def _tell(self, seen: dict[str, object]) -> None:
        replies, self._replies = self._replies, []
        for reply in replies:
            with suppress(Exception):  # no request may ever end a job
                reply(seen)
