"""Which address a node gives out, and whether an endpoint is this machine.

Asks the kernel's routes, never a name service about ourselves: what a host is called, and whether
anybody can resolve that, does not matter. Names of others are looked up here, which may take long:
an agent that has begun leaves that to names.py.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from rallypoint.base.address import endpoint_of, is_loopback, numeric_family
from rallypoint.base.errors import HostError, InvalidArgumentError

_NONLOCAL = "/proc/sys/net/{}/ip_nonlocal_bind"
_RESOLVER, _DOMAIN = "/etc/resolv.conf", "/proc/sys/kernel/domainname"
IFNAME_VARIABLES = ("RALLYPOINT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ANY_PORT = 9  # routes do not depend on it, but 0 is refused by some kernels


class UnknownHostError(HostError):
    """Nobody knows a name; maybe not yet."""


def addresses_of(host: str) -> list[str]:
    """The numeric addresses of a host, IPv4 first; `host` may be numeric itself.

    Raises:
        UnknownHostError: nobody knows the name.
    """
    if numeric_family(host) is not None:
        return [host]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name that is too long is no Unicode to Python
        why = getattr(error, "strerror", None) or str(error)
        raise UnknownHostError(
            f"cannot find the host {host!r} ({why}); give its address instead of its name, or add"
            " it to /etc/hosts."
        ) from None
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_here(host: str, local_addr: str | None = None) -> bool:
    """Whether `host` is this machine: by its names, or because only an own address can be bound.

    Args:
        local_addr: what this machine is called as well, as in --local-addr.

    Raises:
        UnknownHostError: nobody knows the name.
    """
    if is_loopback(host) or is_own_name(host, local_addr):
        return True
    return any(can_bind(address) for address in addresses_of(host))


def is_own_name(host: str, local_addr: str | None = None) -> bool:
    """Whether this machine is called so, as far as it knows without a name service.

    Its names are the host name, alone and with each domain that names are looked up in.
    """
    name = os.uname().nodename.lower()
    if host.lower() in (name, (local_addr or name).lower()):
        return True
    domains: list[str] = []
    with suppress(OSError):
        lines = [line.split() for line in Path(_RESOLVER).read_text().splitlines()]
        found = [words[1:] for words in lines if words[:1] in (["search"], ["domain"])]
        domains += [domain for each in found for domain in each]
    with suppress(OSError):
        domains.append(Path(_DOMAIN).read_text().strip())
    return any(host.lower() == f"{name}.{domain.lower().strip('.')}" for domain in domains)


def own_address(endpoint_host: str, local_addr: str | None = None) -> str:
    """The address that this node gives out to those who meet at an endpoint.

    That of the interface which routes to it, or `local_addr`'s, as in --local-addr.

    Raises:
        UnknownHostError: nobody knows a name.
        HostError: there is no route.
        InvalidArgumentError: the others could not reach `local_addr`.
    """
    if local_addr is not None:
        found = addresses_of(local_addr)
        local_addr = next((each for each in found if can_bind(each)), found[0])
        if is_loopback(local_addr) and not is_loopback(endpoint_host):
            raise InvalidArgumentError(
                f"--local-addr {local_addr} is this machine's loopback, which nodes that meet at"
                f" {endpoint_host} cannot reach; give the address of a network interface."
            )
        return local_addr
    if is_loopback(endpoint_host):
        return "127.0.0.1" if endpoint_host == "localhost" else endpoint_host
    refused = ""
    for address in addresses_of(endpoint_host):
        try:
            return _address_towards(address)
        except OSError as error:
            refused = error.strerror or str(error)
    raise HostError(
        f"there is no route to {endpoint_host} ({refused}); look at the network interfaces, or name"
        " this machine's address with --local-addr."
    )


def check_reachable(address: str, endpoint: tuple[str, int]) -> None:
    """Refuse to tell remote nodes a loopback address.

    Raises:
        HostError: `address` is this machine's loopback, and `endpoint` is elsewhere.
    """
    if is_loopback(address) and not is_loopback(endpoint[0]):
        raise HostError(
            f"this node's address towards {endpoint_of(*endpoint)} is its loopback {address}, which"
            " other nodes cannot reach; look at /etc/hosts, or name an address with --local-addr."
        )


def _address_towards(address: str) -> str:
    """Connecting a datagram socket asks for the route and sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])


def can_bind(address: str) -> bool:
    """Whether a numeric address is this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
        # Where any address can be bound, as on load balancers, the route to it tells.
        return not _binds_any(family) or _address_towards(address) == address
    except OSError:
        return False


def _binds_any(family: socket.AddressFamily) -> bool:
    version = "ipv6" if family == socket.AF_INET6 else "ipv4"
    try:
        return Path(_NONLOCAL.format(version)).read_text().strip() == "1"
    except OSError:
        return False
