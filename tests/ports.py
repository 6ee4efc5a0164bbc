"""Ports at which nobody listens, and which no other process gets meanwhile.

A port that was free a moment ago may be taken: other tests, and any connection, draw from the same
range. A socket that is bound but does not listen keeps it: connections are refused, and only a
listener with SO_REUSEADDR, as ours are, may bind it, too.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """So many ports of the loopback."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in held:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
        yield [sock.getsockname()[1] for sock in held]


@contextmanager
def reserved_port() -> Iterator[int]:
    """One port of the loopback."""
    with reserved_ports(1) as (port,):
        yield port
