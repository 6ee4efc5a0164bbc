"""Which address a node gives out, and whether an endpoint is this machine.

Asks the kernel's routes, never a name service about ourselves: what a host is called, and whether
anybody can resolve that, does not matter. A name of another host is looked up once.
"""

from __future__ import annotations

import os
import socket

from rallypoint.base.address import endpoint_of, is_loopback, numeric_family
from rallypoint.base.errors import HostError, InvalidArgumentError

_ANY_PORT = 9  # routes do not depend on it, but 0 is refused by some kernels


def addresses_of(host: str) -> list[str]:
    """The numeric addresses of a host, IPv4 first; `host` may be numeric itself.

    Raises:
        HostError: nobody knows the name.
    """
    if numeric_family(host) is not None:
        return [host]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HostError(
            f"cannot find the host {host!r} ({error.strerror}); give its address instead of its"
            " name, or add it to /etc/hosts."
        ) from None
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_here(host: str) -> bool:
    """Whether `host` is this machine: only an address of our own can be bound.

    Raises:
        HostError: nobody knows the name.
    """
    if is_loopback(host) or host.lower() == os.uname().nodename.lower():
        return True
    return any(_can_bind(address) for address in addresses_of(host))


def own_address(endpoint_host: str, local_addr: str | None = None) -> str:
    """The address that this node gives out to those who meet at an endpoint.

    That of the interface which routes to it, or `local_addr`, as in --local-addr.

    Raises:
        HostError: there is no route, or nobody knows the endpoint's name.
        InvalidArgumentError: the others could not reach `local_addr`.
    """
    if local_addr is not None:
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


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
