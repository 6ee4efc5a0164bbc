"""The addresses of hosts, which of them are this machine's, and which one it gives to others.

For this host it asks the kernel, never a name service: this host's name, and whether others can
resolve it, do not matter. Names of other hosts are looked up here, which may take long; running
agents use names.py instead.

`choose_network` collects the inputs of interface_choice.py: the user's settings, addresses of
names, interfaces and routes (netlink.py). Launcher and process groups use it, so that they choose
alike. A user may name interfaces: RALLYPOINT_SOCKET_IFNAME, or GLOO_SOCKET_IFNAME, or
NCCL_SOCKET_IFNAME, as a list of prefixes ("eth,ib"), of exact names ("=eth0"), or of interfaces not
to use ("^docker,lo"). Without one, it is the address from which this machine reaches the store.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.address import is_loopback, numeric_family
from rallypoint.base.errors import HostError
from rallypoint.base.files import read_text
from rallypoint.cluster.interface_choice import (
    AddressChoice,
    NameChoice,
    NetworkChoice,
    choose,
    ranked,
)
from rallypoint.cluster.interface_facts import InterfaceKind, InterfaceTarget, Route
from rallypoint.cluster.netlink import (
    addresses_without_netlink,
    default_interface,
    read_interfaces,
    route_to,
    source_towards,
)

LookUp = Callable[[str], list[str]]

_NONLOCAL = "/proc/sys/net/{}/ip_nonlocal_bind"
_RESOLVER, _DOMAIN = "/etc/resolv.conf", "/proc/sys/kernel/domainname"
IFNAME_VARIABLES = ("RALLYPOINT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "127.0.0.1"
_MAX_ADDRESSES = 16


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
    """Whether `host` is this machine: by its names, or as only own addresses can be bound."""
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
    lines = [line.split() for line in read_text(_RESOLVER).splitlines()]
    found = [words[1:] for words in lines if words[:1] in (["search"], ["domain"])]
    domains = [domain for each in found for domain in each] + [read_text(_DOMAIN).strip()]
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
    return read_text(_NONLOCAL.format(version)).strip() == "1"


# The address that a node or rank gives to those that connect to it.


def choose_network(
    hosts: Sequence[str],
    environ: Mapping[str, str],
    *,
    local_addr: str | None = None,
    by: str = "--local-addr",
    has_remote_peers: bool = False,
    look_up: LookUp = addresses_of,
) -> NetworkChoice:
    """The address that this machine advertises to the nodes at `hosts`, and the reason.

    Args:
        hosts: names or addresses in order of preference; empty if nothing is known. Each is tried
            only if there is no route to those before it.
        local_addr: the user's name for this machine, from the flag or variable `by`.
        has_remote_peers: whether some are on other machines, even if `hosts` does not show it.
        look_up: what resolves a name.
    """
    wish = _wish_for_address(local_addr, by, look_up) if local_addr else _wish_by_name(environ)
    towards: list[InterfaceTarget] = []
    for host in hosts:
        towards += targets_of(host, look_up)
        if any(each.route is not None for each in towards):
            break
    return choose(
        read_interfaces(),
        wish=wish,
        towards=towards,
        has_remote_peers=has_remote_peers,
        default=default_interface(),
    )


def targets_of(host: str, look_up: LookUp = addresses_of) -> list[InterfaceTarget]:
    """How this machine reaches each of a host's addresses, those with a route first."""
    found = []
    for address in [_LOOPBACK] if host == "localhost" else look_up(host):
        route: Route | None = None
        why = ""
        try:
            route = route_to(address)
        except OSError as error:
            why = error.strerror or str(error)
        family = numeric_family(address)  # None: it is valid on one link only, which it names
        packed = b"" if family is None else socket.inet_pton(family, address)
        found.append(
            InterfaceTarget(name=host, address=address, packed=packed, route=route, why_not=why)
        )
    return sorted(found, key=lambda each: each.route is None)


def chosen_address(environ: Mapping[str, str]) -> str | None:
    """The address of the interface that a variable names; None if no variable is set."""
    wish = _wish_by_name(environ)
    return None if wish is None else choose(read_interfaces(), wish=wish).address


def own_addresses() -> tuple[str, ...]:
    """The addresses of all interfaces except loopback, the most reachable first; only the first
    few.

    One IPv4 and one IPv6 address of each interface, then the rest.
    """
    firsts: list[str] = []
    rest: list[str] = []
    interfaces = read_interfaces()
    if not interfaces:  # a sandbox refuses netlink
        told = addresses_without_netlink()
        return tuple([each for each in told if not is_loopback(each)])[:_MAX_ADDRESSES]
    for each in ranked(interfaces, default_interface()):
        if each.kind is InterfaceKind.LOOPBACK:
            continue
        for length in (4, 16):
            texts = [
                address.text
                for address in each.addresses
                if len(address.packed) == length and not address.is_link_only
            ]
            firsts += texts[:1]
            rest += texts[1:]
    return tuple(dict.fromkeys([*firsts, *rest]))[:_MAX_ADDRESSES]


def _wish_for_address(local_addr: str, by: str, look_up: LookUp) -> AddressChoice:
    try:
        found = look_up(local_addr)
    except UnknownHostError as error:
        raise UnknownHostError(f"{by} {local_addr}: {error}") from None
    own = [each for each in found if can_bind(each)]
    return AddressChoice(by=by, text=local_addr, addresses=tuple(found), own=tuple(own))


def _wish_by_name(environ: Mapping[str, str]) -> NameChoice | None:
    for variable in IFNAME_VARIABLES:
        if wish := environ.get(variable):
            return NameChoice(by=variable, text=wish)
    return None
