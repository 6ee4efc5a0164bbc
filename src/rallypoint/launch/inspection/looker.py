"""Has a separate process inspect this agent's node; __main__.py is that process."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence
from contextlib import suppress

from rallypoint.launch.inspection.child import Child
from rallypoint.launch.inspection.requests import Conversations, Reply


class Looker:
    """Inspects once at a time; concurrent askers get the same answer."""

    def __init__(self, selector: selectors.BaseSelector, conversations: Conversations) -> None:
        self._selector = selector
        self._conversations = conversations
        self._replies: list[Reply] = []
        self._child: Child | None = None

    def look(self, reply: Reply, words: Sequence[str] = ("node",)) -> None:
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
