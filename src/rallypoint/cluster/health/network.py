"""The network interfaces of this node, with speed and largest packet."""

from __future__ import annotations

import socket

from rallypoint.cluster.devices import read_text
from rallypoint.cluster.health.facts import Interface
from rallypoint.cluster.interface import interface_of, own_addresses


def look_at_interfaces(root: str = "") -> tuple[Interface, ...]:
    """Those that have an address, without the loopback."""
    addresses: dict[str, list[str]] = {}
    for address in own_addresses():
        addresses.setdefault(interface_of(address), []).append(address)
    return tuple(
        Interface(
            name=name,
            addresses=tuple(addresses[name]),
            mtu=_number(f"{root}/sys/class/net/{name}/mtu"),
            speed_mbps=max(0, _number(f"{root}/sys/class/net/{name}/speed")),
        )
        for _, name in socket.if_nameindex()
        if name in addresses
    )


def _number(path: str) -> int:
    """0: the kernel does not say, as of interfaces that are no hardware."""
    try:
        return int(read_text(path))
    except ValueError:
        return 0
