"""The links that carry orders to a node and its answers back."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.base.errors import HostError
from rallypoint.base.memory_file import memory_file
from rallypoint.cli.doctor.examined_node import GREETING, MODULE, ExaminedNode
from rallypoint.cluster.order_link import OrderLink
from rallypoint.cluster.remote_shell import command_on, version_trouble

_LEAVE_S = 2.0


class NodeLink(ABC):
    """The link to one node; `name` is empty if the node itself provides it."""

    name = ""

    @abstractmethod
    def begin(self) -> None:
        """Wait until the node answers.

        Raises:
            HostError: it does not, or cannot be examined.
        """

    @abstractmethod
    def ask(self, order: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        """Send an order; returns the answer.

        Raises:
            HostError: no answer came.
        """

    def leave(self) -> None:  # noqa: B027 - most links have nobody to tell
        """Say that the node is no longer needed. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """End everything that belongs to this link, here and on the node."""


class OwnLink(NodeLink):
    """The link for this process as a node."""

    def __init__(self, node: ExaminedNode, name: str = "") -> None:
        self.name = name
        self._node = node

    def begin(self) -> None:
        """See NodeLink."""

    def ask(self, order: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        return self._node.perform(order)

    def close(self) -> None:
        self._node.close()


class ShellLink(NodeLink):
    """The link to a host that ssh reaches."""

    def __init__(self, host: str, rsh: Sequence[str]) -> None:
        self.name = host.rpartition("@")[2]
        # Error output goes to memory: that needs no disk, which may be full, and leaves no file
        # behind.
        self._log = memory_file("rallypoint-doctor")
        log = Path(f"/proc/self/fd/{self._log}")
        self._link = OrderLink(host, command_on(host, rsh, MODULE), log)

    def begin(self) -> None:
        self._link.greet(GREETING)
        trouble = version_trouble(self._link.found)
        if trouble:
            raise HostError(trouble)

    def ask(self, order: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        self._link.tell(order)
        return self._link.read(wait_s)

    def leave(self) -> None:
        self._link.close()

    def close(self) -> None:
        self._link.end(time.monotonic() + _LEAVE_S)
        os.close(self._log)


class SocketLink(NodeLink):
    """The link to a node that came to the endpoint, and has proved that it knows the token."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._socket = connection
        self._lines = connection.makefile("rb")

    def begin(self) -> None:
        """See NodeLink."""

    def ask(self, order: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        self._socket.settimeout(wait_s)
        try:
            send_line(self._socket, order)
            line = self._lines.readline()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            why = "no reply in time" if isinstance(error, TimeoutError) else "the connection ended"
            raise HostError(why) from None
        return answer

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send an order that has no answer."""
        with contextlib.suppress(OSError):  # the node then examines itself
            send_line(self._socket, order)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def send_line(connection: socket.socket, what: Mapping[str, Any]) -> None:
    """Send an order, or the answer to one.

    Raises:
        OSError: the connection broke.
    """
    connection.sendall((json.dumps(what) + "\n").encode())
