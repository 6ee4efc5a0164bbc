"""Addresses: numeric ones and names, without a name service; and whether the loopback works."""

from __future__ import annotations

import errno
import socket

_ANY_PORT = 9
_SIOCGIFFLAGS, _IFF_UP = 0x8913, 1


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`, without looking it up."""
    return host in {"localhost", "::1"} or host.startswith("127.")


def numeric_family(host: str) -> socket.AddressFamily | None:
    """Return the family of a numeric address, None if `host` is a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return family
    return None


def loopback_trouble(host: str) -> str:
    """Why this machine does not reach itself at a loopback address; empty if it does."""
    address = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        probe = socket.socket(family, socket.SOCK_DGRAM)
    except OSError:  # there is no such family, or no descriptor left
        return ""
    with probe:
        try:
            probe.connect((address, _ANY_PORT))  # sends nothing: it only looks for the way
            if is_loopback(probe.getsockname()[0]):
                return ""
        except OSError as error:
            if error.errno not in (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EHOSTUNREACH):
                return ""
        if not _is_up(probe):
            return (
                "the loopback interface is down, and without it processes of this machine cannot "
                "reach each other; run `ip link set lo up` as root"
            )
    length = 8 if family == socket.AF_INET else 128
    return (
        f"no interface has the address {address}, and without it processes of this machine cannot "
        f"reach each other; run `ip address add {address}/{length} dev lo` as root"
    )


def _is_up(sock: socket.socket) -> bool:
    import fcntl
    import struct

    try:
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16s24x", b"lo"))
    except OSError:  # there is no such interface
        return False
    return bool(struct.unpack_from("@h", answer, 16)[0] & _IFF_UP)


def endpoint_of(host: str, port: int) -> str:
    """Return how messages name a server."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
