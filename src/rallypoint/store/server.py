"""The store's server: a listening socket here, the loop in a native thread without the GIL.

It never looks up a peer's name. Closing it joins the thread and closes every connection; a forked
child closes its copies of the descriptors. Imports are few: each delays the launcher's start.
"""

from __future__ import annotations

import errno
import os
import socket
import weakref
from collections.abc import Iterable

from rallypoint import _native
from rallypoint.base.address import endpoint_of, numeric_family
from rallypoint.base.errors import HostError, InvalidArgumentError, StoreConnectionError
from rallypoint.base.port_range import bind_free
from rallypoint.base.worker_env import read_silence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

_BACKLOG = 4096
_STDERR = 2


class StoreServer:
    """Serves a key-value store to stock ``TCPStore`` clients and ours, from construction on.

    Args:
        host: address or name to listen on; ``"::"`` is every interface, IPv4 and IPv6.
        port: 0 takes a free one, of RALLYPOINT_PORT_RANGE if that is set.
        listen_fd: a bound socket to take over instead.
        token: clients must prove that they know it before another byte of theirs is looked at.
            Stock clients cannot.
        silence_s: after which keys of a client whose machine does not answer are deleted, if they
            go with its connection; RALLYPOINT_SILENCE or 5, unless given.
        log_fd: where one line goes for each peer that is turned away; -1 is nowhere.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        listen_fd: int | None = None,
        token: bytes | None = None,
        silence_s: int | None = None,
        log_fd: int = _STDERR,
    ) -> None:
        if token is not None and not token:
            raise InvalidArgumentError("the store's token is empty; pass None for no token")
        silence_s = read_silence(os.environ) if silence_s is None else silence_s
        if listen_fd is not None:
            listener = socket.socket(fileno=listen_fd)
            listener.listen(_BACKLOG)
            host = listener.getsockname()[0]
        else:
            listener = _listen(host, port)
        self.host: str = host
        self.port: int = listener.getsockname()[1]
        self._native = _native.StoreServer(listener.detach(), log_fd, token or b"", silence_s)
        _servers.add(self)

    def allow(self, hosts: Iterable[str]) -> None:
        """From now on let in only these addresses, and loopback. Connected clients stay."""
        self._native.allow(b"".join(map(_packed, hosts)))

    def counters(self) -> tuple[int, int, int]:
        """Return how many connections, keys outside rounds, and requests so far there are."""
        return self._native.counters()

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _packed(host: str) -> bytes:
    family = numeric_family(host)
    if family is None:
        raise InvalidArgumentError(
            f"only numeric addresses can be admitted to a store, not {host!r}; resolve it first"
        )
    packed = socket.inet_pton(family, host)
    return packed if family == socket.AF_INET6 else bytes(10) + b"\xff\xff" + packed


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, address = _resolve(host)
        if port:
            return _bind(family, address, port)
        return bind_free(lambda free: _bind(family, address, free))
    except (OSError, OverflowError, HostError) as error:
        raise _refusal(host, port, error) from error


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            only_v6 = 0 if address == "::" else 1
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    if host in {"", "::", "*"}:
        return (socket.AF_INET6, "::") if _has_ipv6() else (socket.AF_INET, "0.0.0.0")
    if family := numeric_family(host):
        return family, host
    # The listening address is the owner's own name; peers are never looked up.
    found, _, _, _, name = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return found, str(name[0])


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _refusal(host: str, port: int, error: Exception) -> StoreConnectionError:
    why = str(error)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        from rallypoint.store.port_holder import holder_of

        why = f"it is in use by {holder_of(port)}"
    return StoreConnectionError(
        f"the store cannot listen on {endpoint_of(host, port)} ({why}); "
        "choose another port, or 0 for any",
        endpoint=endpoint_of(host, port),
        operation="listen",
    )


_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _abandon_in_child() -> None:
    # Otherwise the child would keep the port and the connections open after the parent's death.
    for server in list(_servers):
        server._native.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
