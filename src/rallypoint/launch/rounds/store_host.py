"""Where an agent listens: the workers' store of one round, at MASTER_ADDR:MASTER_PORT, and sockets.

Node rank 0 has the store, whatever the source of its rounds; each source's `_open_store` uses this.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Sequence

from rallypoint.base.address import is_loopback, numeric_family
from rallypoint.base.errors import HostError
from rallypoint.base.port_range import VARIABLE as PORT_RANGE
from rallypoint.base.port_range import bind_free
from rallypoint.rendezvous.job.round import Endpoint, Member

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.store.server import StoreServer

ANY = "::"  # every interface, IPv4 and IPv6


def addresses_of_members(members: Iterable[Member]) -> list[str]:
    """The addresses of a round's workers, in numeric form.

    The store's protocol has no token, so it checks addresses; see
    docs/decisions/035-who-may-speak.md.
    """
    given = [address for each in members for address in (each.address, *each.addresses)]
    return [each for each in dict.fromkeys(given) if numeric_family(each) is not None]


class StoreHost:
    """A store server, empty at first.

    Workers can connect once it is constructed, and are served from `serve` on. Meanwhile the agent
    starts them, so that the server's start takes no extra time.

    Args:
        host: the address to listen on; `ANY` is every interface.
        port: 0 takes a free one.
        silence_s: as for StoreServer.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, silence_s: int | None = None
    ) -> None:
        self._listener = listen(host, port)
        self._server: StoreServer | None = None
        self._silence_s = silence_s
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = Endpoint(host=host, port=self.port)

    def serve(self, allowed: Sequence[str] | None = None) -> None:
        """Begin to answer, only to `allowed` addresses; a second call does nothing."""
        from rallypoint.store.server import StoreServer

        if self._server is None:
            fd = self._listener.detach()
            self._server = StoreServer(listen_fd=fd, silence_s=self._silence_s)
            if allowed is not None:
                self._server.allow(allowed)

    def allow(self, allowed: Sequence[str]) -> None:
        """From now on answer only these addresses."""
        if self._server is not None:
            self._server.allow(allowed)

    def close(self) -> None:
        """Stop listening; connections end."""
        self._listener.close()
        if self._server is not None:
            self._server.close()


def listening_address(address: str, *, is_chosen: bool = False) -> str:
    """Where to listen for nodes that reach this one at this address."""
    if not is_loopback(address):
        return address if is_chosen else ANY
    return "127.0.0.1" if address == "localhost" else address


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is a free one of RALLYPOINT_PORT_RANGE, if that is set."""
    if not port and os.environ.get(PORT_RANGE):
        return bind_free(lambda free: _listen(host, free))
    try:
        return _listen(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise HostError(
                f"cannot listen on {host}, port {port}: {error.strerror or error};"
                " give another address or port (--master-addr and --master-port, or"
                " --rdzv-endpoint)."
            ) from None
        from rallypoint.store.port_holder import holder_of

        raise HostError(
            f"cannot listen on {host}, port {port}: it is in use by {holder_of(port)};"
            " end that process, or choose another port (--master-port, or that of --rdzv-endpoint)."
        ) from None


def _listen(host: str, port: int) -> socket.socket:
    if host == ANY and socket.has_dualstack_ipv6():
        return socket.create_server(
            (ANY, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
        )
    host = "0.0.0.0" if host == ANY else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=4096)


def make_room(connections: int) -> None:
    """Ensure that this process can open this many more descriptors."""
    lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # that is free
    os.close(lowest)
    if _allows(lowest + connections):
        return
    allow_many_connections()
    if not _allows(lowest + connections):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _allows(descriptors: int) -> bool:
    limit = os.sysconf("SC_OPEN_MAX")  # without importing resource
    return limit < 0 or descriptors <= limit


def allow_many_connections() -> None:
    """Raise this process's limit of descriptors as far as possible."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:  # contextlib would cost each launch
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        return  # it works with fewer
