"""The agent's end of one worker's control socket; the messages are base/control_message.py's.

It never blocks and never raises for what a worker sends: unreadable messages are dropped, because a
broken worker must not break the agent.
"""

from __future__ import annotations

import socket

from rallypoint.base.control_message import (
    MAX_MESSAGE_BYTES,
    Known,
    Message,
    UnknownMessage,
    decode,
    encode,
)
from rallypoint.base.errors import ControlMessageError

_MAX_PER_READ = 16  # one worker must not keep the agent from the others


class ControlChannel:
    """A socket whose other end a worker inherits."""

    def __init__(self) -> None:
        self._socket, self._worker_end = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        )
        self._worker_end.setblocking(True)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    @property
    def worker_fileno(self) -> int:
        """The descriptor for the worker, until `started`."""
        return self._worker_end.fileno()

    def started(self) -> None:
        """The worker has its end; close ours of it, so that its death shows as an end of file."""
        self._worker_end.close()

    def receive(self) -> tuple[list[Message], bool]:
        """The messages received, and whether more may come."""
        messages: list[Message] = []
        for _ in range(_MAX_PER_READ):
            try:
                packet = self._socket.recv(MAX_MESSAGE_BYTES + 1)
            except BlockingIOError:
                return messages, True
            except OSError:
                return messages, False
            if not packet:
                return messages, False
            try:
                message = decode(packet)
            except ControlMessageError:
                continue
            if not isinstance(message, UnknownMessage):
                messages.append(message)
        return messages, True

    def send(self, message: Known) -> None:
        """Send one message; a worker that has ended, or takes none, shows it in other ways."""
        try:
            self._socket.send(encode(message))
        except OSError:
            return

    def close(self) -> None:
        """Close the agent's end."""
        self._socket.close()
        self._worker_end.close()
