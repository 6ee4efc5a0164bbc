"""The addresses of hosts, and whether an endpoint is this machine.

For this host it asks the kernel, never a name service: this host's name, and whether others can
resolve it, do not matter. Names of other hosts are looked up here, which may take long; running
agents use names.py instead. interface.py determines the address that a node gives to others.
"""

from __future__ import annotations

import os
import socket

from rallypoint.base.address import is_loopback, numeric_family
from rallypoint.base.errors import HostError
from rallypoint.cluster.netlink import source_towards

_NONLOCAL = "/proc/sys/net/{}/ip_nonlocal_bind"
_RESOLVER, _DOMAIN = "/etc/resolv.conf", "/proc/sys/kernel/domainname"
IFNAME_VARIABLES = ("RALLYPOINT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class UnknownHostError(HostError):
    """A name cannot be resolved, perhaps only not yet."""


def addresses_of(host: str) -> list[str]:
    """The numeric addresses of a host, IPv4 first; `host` may be numeric itself."""
    if numeric_family(host) is not None:
        return [host]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # Python reports a name that is too long as a UnicodeError
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UnknownHostError(
            f"cannot find the host {host!r} ({why}); give its address instead of its name, or add "
            "it to /etc/hosts."
        ) from None
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_here(host: str, local_addr: str | None = None) -> bool:
    """Whether `host` is this machine: by its names, or because only a machine's own addresses can
    be bound.

    Args:
        local_addr: another name of this machine, as in --local-addr.
    """
    if is_loopback(host) or is_own_name(host, local_addr):
        return True
    return any(can_bind(address) for address in addresses_of(host))


def is_own_name(host: str, local_addr: str | None = None) -> bool:
    """Whether this is a name of this machine, as far as it knows without a name service.

    Its names are the host name, alone and with each search domain.
    """
    name = os.uname().nodename.lower()
    if host.lower() in (name, (local_addr or name).lower()):
        return True
    lines = [line.split() for line in _text(_RESOLVER).splitlines()]
    found = [words[1:] for words in lines if words[:1] in (["search"], ["domain"])]
    domains = [domain for each in found for domain in each] + [_text(_DOMAIN).strip()]
    return any(host.lower() == f"{name}.{domain.lower().strip('.')}" for domain in domains)


def can_bind(address: str) -> bool:
    """Whether a numeric address is this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
        # Where any address can be bound, as on load balancers, the route decides.
        return not _binds_any(family) or source_towards(address) == address
    except OSError:
        return False


def _binds_any(family: socket.AddressFamily) -> bool:
    version = "ipv6" if family == socket.AF_INET6 else "ipv4"
    return _text(_NONLOCAL.format(version)).strip() == "1"


def _text(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
