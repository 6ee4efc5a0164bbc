"""The network interfaces of this node, in the form that the checks need."""

from __future__ import annotations

from rallypoint.cluster.interface_facts import InterfaceKind
from rallypoint.cluster.netlink import read_interfaces
from rallypoint.doctor.cluster_facts import InterfaceFact


def look_at_interfaces() -> tuple[InterfaceFact, ...]:
    """The interfaces, except loopback, with an address that is valid beyond the link."""
    return tuple(
        InterfaceFact(
            name=each.name,
            addresses=tuple(one.text for one in each.addresses if not one.is_link_only),
            mtu=each.mtu,
            speed_mbps=max(0, each.speed_mbps or 0),
        )
        for each in read_interfaces()
        if each.is_useful and each.kind is not InterfaceKind.LOOPBACK
    )


def interface_of(address: str) -> str:
    """The name of the interface that has this address; empty if none has."""
    return next((each.name for each in look_at_interfaces() if address in each.addresses), "")
