"""The store that the agent hosts for its workers at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import socket

from rallypoint.launch.job import Endpoint

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.store.server import StoreServer


class StoreHost:
    """A store server, on loopback because all workers are local.

    From construction on workers can connect, and from `serve` on they are served. In between the
    agent starts them, so that the server's own start costs no time.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server: StoreServer | None = None
        self.endpoint = Endpoint(host="127.0.0.1", port=self._listener.getsockname()[1])

    def serve(self) -> None:
        """Begin to answer."""
        from rallypoint.store.server import StoreServer

        self._server = StoreServer(listen_fd=self._listener.detach())

    def close(self) -> None:
        """Stop listening; connections end."""
        self._listener.close()
        if self._server is not None:
            self._server.close()
