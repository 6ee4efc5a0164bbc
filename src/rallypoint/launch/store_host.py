"""The store that the agent hosts for its workers at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import socket

from rallypoint.launch.job import Endpoint


class StoreHost:
    """A running store server, on loopback because all workers are local."""

    def __init__(self) -> None:
        # Until the server of rallypoint.store is here, only the port is taken.
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(host="127.0.0.1", port=self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening; connections end."""
        self._listener.close()
