"""The store's server: a listening socket here, the loop in a native thread without the GIL.

It never asks a name service about a peer. Closing joins the thread and closes every connection.
"""

from __future__ import annotations

import ipaddress
import socket
from types import TracebackType
from typing import Self

from rallypoint import _native
from rallypoint.base.errors import StoreConnectionError

_BACKLOG = 4096
_LOG = 2  # standard error


class StoreServer:
    """Serves a key-value store to stock ``TCPStore`` clients and ours, from construction on.

    Args:
        host: address or name to listen on; ``"::"`` is every interface, IPv4 and IPv6.
        port: 0 takes a free one.
        listen_fd: a bound socket to take over instead; `host` and `port` are then its own.

    Raises:
        StoreConnectionError: the address cannot be listened on.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, listen_fd: int | None = None
    ) -> None:
        if listen_fd is not None:
            listener = socket.socket(fileno=listen_fd)
            listener.listen(_BACKLOG)
        else:
            listener = _listen(host, port)
        self.host: str = host
        self.port: int = listener.getsockname()[1]
        self._native = _native.StoreServer(listener.detach(), _LOG)

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, address = _resolve(host)
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _refusal(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            only_v6 = 0 if address == "::" else 1
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _refusal(host, port, error) from error
    return listener


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    if host in {"", "::", "*"}:
        if _has_ipv6():
            return socket.AF_INET6, "::"
        return socket.AF_INET, "0.0.0.0"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        family, _, _, _, name = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        return family, str(name[0])
    return (socket.AF_INET6 if address.version == 6 else socket.AF_INET), host


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _refusal(host: str, port: int, error: Exception) -> StoreConnectionError:
    return StoreConnectionError(
        f"the store cannot listen on {host}:{port} ({error}); choose another port, or 0 for any",
        endpoint=f"{host}:{port}",
        operation="listen",
    )
