"""Which of this machine's addresses a rank gives to those that connect to it.

A user may name interfaces: RALLYPOINT_SOCKET_IFNAME, or GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME.
The value is a list of prefixes ("eth,ib"), of exact names ("=eth0"), or of what not to use
("^docker,lo"), as NCCL reads it. Without one, the address from which this machine reaches the store
is the right one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import HostError
from rallypoint.cluster.network import IFNAME_VARIABLES, own_address

_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913
_IFF_UP = 0x1
_MAX_ADDRESSES = 16


def listening_address(store_host: str | None, environ: Mapping[str, str]) -> str:
    """The address at which this rank is to be reached.

    Args:
        store_host: where the store is; None if it has no place in the network, as a file.

    Raises:
        HostError: no interface of that name has an address, or there is no route to the store.
    """
    if chosen := chosen_address(environ):
        return chosen
    if store_host is not None and not is_loopback(store_host):
        return own_address(store_host)
    if store_host is not None:
        return "::1" if ":" in store_host else "127.0.0.1"
    return any_address()


def chosen_address(environ: Mapping[str, str]) -> str | None:
    """The address of the interface that a variable names; None: there is none.

    Raises:
        HostError: no interface of that name has an address.
    """
    for variable in IFNAME_VARIABLES:
        if wish := environ.get(variable):
            return address_of_interface(wish, variable)
    return None


def address_of_interface(wish: str, variable: str) -> str:
    """The first address of an interface that `wish` names.

    Raises:
        HostError: there is none.
    """
    names = [name for _, name in socket.if_nameindex()]
    for name in matching(wish, names):
        if address := _address(name):
            return address
    raise HostError(
        f"{variable}={wish}: no interface of this machine that is up and has an address matches; "
        f"it has {', '.join(names)}"
    )


def matching(wish: str, names: Sequence[str]) -> list[str]:
    """Those of the names that a list of prefixes (or "=" names, or "^" exclusions) chooses.

    In the order of the list, so that the first choice comes first.
    """
    is_exact = wish.lstrip("^").startswith("=")
    words = [word for word in wish.lstrip("^=").split(",") if word]

    def fits(name: str, word: str) -> bool:
        return name == word if is_exact else name.startswith(word)

    if wish.startswith("^"):
        return [name for name in names if not any(fits(name, word) for word in words)]
    return list(dict.fromkeys(name for word in words for name in names if fits(name, word)))


def host_identity() -> str:
    """What is the same for two processes exactly if they can share memory and see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        kinds = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid")]
    except OSError:
        return os.uname().nodename
    return "/".join([boot, *map(str, kinds)])


def any_address() -> str:
    """Of the first interface that others can reach; else the loopback."""
    for _, name in socket.if_nameindex():
        if name != "lo" and (address := _address(name)):
            return address
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """The name of the interface that has this address; empty: none has."""
    for _, name in socket.if_nameindex():
        if address in (_address(name), _ipv6_address(name)):
            return name
    return ""


def own_addresses() -> tuple[str, ...]:
    """Of all interfaces but the loopback, one IPv4 and one IPv6 address each; the first few."""
    found: list[str] = []
    for _, name in socket.if_nameindex():
        if name != "lo":
            found += [each for each in (_address(name), _ipv6_address(name)) if each]
    return tuple(dict.fromkeys(found))[:_MAX_ADDRESSES]


def _address(name: str) -> str | None:
    """An interface's address, IPv4 first; None if it is down or has none."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            flags = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
            if not struct.unpack_from("H", flags, 16)[0] & _IFF_UP:
                return None
            found = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            return _ipv6_address(name)
    return socket.inet_ntoa(found[20:24])


def _ipv6_address(name: str) -> str | None:
    """An address that is not only good on the link, where each needs the interface's number."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        packed, _, _, scope, _, owner = line.split()
        if owner == name and scope != "20":
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))
    return None
