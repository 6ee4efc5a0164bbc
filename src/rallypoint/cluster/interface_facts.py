"""This machine's network interfaces and routes, as frozen data.

netlink.py reads them, interface_choice.py uses them to decide, `rallypoint where` shows them. Pure:
records, and what can be derived from a single record.
"""

from __future__ import annotations

from enum import Enum

from rallypoint.base.address import is_loopback
from rallypoint.base.record import Record


class InterfaceKind(Enum):
    """The kind of an interface; the values are for people."""

    LOOPBACK = "loopback"
    PHYSICAL = "network card"
    INFINIBAND = "InfiniBand"
    STACKED = "on top of another interface"  # VLAN, bond, team, macvlan, ipvlan
    VETH = "virtual pair"  # the network card of a container or test host
    BRIDGE = "bridge"
    CONTAINER_BRIDGE = "container bridge"  # only containers of this machine are attached
    TUNNEL = "tunnel"
    OTHER = "virtual"


class Address(Record, kw_only=True):
    """One address of an interface.

    Attributes:
        packed: its 4 or 16 bytes, in network order.
        prefix: the number of leading bits that identify the network.
        is_link_only: whether it is valid only on the link (fe80::/10, 169.254.0.0/16).
        is_passing: whether it expires, or should not be given to others (IPv6: temporary,
            deprecated).
    """

    text: str
    packed: bytes
    prefix: int
    is_link_only: bool = False
    is_passing: bool = False

    def is_network_of(self, packed: bytes) -> bool:
        """Whether another address is in the same network."""
        if len(packed) != len(self.packed):
            return False
        shift = 8 * len(packed) - self.prefix
        return int.from_bytes(packed) >> shift == int.from_bytes(self.packed) >> shift


class Interface(Record, kw_only=True):
    """One interface.

    Attributes:
        is_up: whether it is usable: up, and with a link as far as the kernel knows.
        mtu: in bytes.
        speed_mbps: in Mbit/s, from the driver; None if unknown.
    """

    name: str
    index: int = 0
    kind: InterfaceKind = InterfaceKind.PHYSICAL
    is_up: bool = True
    mtu: int = 1500
    speed_mbps: int | None = None
    addresses: tuple[Address, ...] = ()

    @property
    def is_useful(self) -> bool:
        """Whether it leads to other machines."""
        has_address = any(not each.is_link_only for each in self.addresses)
        return self.is_up and has_address and self.kind is not InterfaceKind.LOOPBACK

    @property
    def is_candidate(self) -> bool:
        """Whether others may reach this machine through it."""
        return self.is_useful and self.kind is not InterfaceKind.CONTAINER_BRIDGE

    @property
    def rate(self) -> str:
        """``"25 Gbit/s, MTU 9000"``; the speed only where it is known."""
        mtu = f"MTU {self.mtu}"
        if self.speed_mbps is None:
            return mtu
        is_giga = self.speed_mbps >= 1000
        speed = f"{self.speed_mbps / 1000:g} Gbit/s" if is_giga else f"{self.speed_mbps} Mbit/s"
        return f"{speed}, {mtu}"

    def __str__(self) -> str:
        """``"eth0 (10.0.0.1, fd00::1)"``, or why it cannot be used."""
        shown = [each.text for each in self.addresses if not each.is_link_only]
        shown = shown or [each.text for each in self.addresses]
        words = ([] if self.is_up else ["down"]) + (shown or ["no address"])
        return f"{self.name} ({', '.join(words)})"


class Route(Record, kw_only=True):
    """How the kernel reaches one address.

    Attributes:
        interface: the interface by which packets leave; empty if the kernel did not say.
        source: this machine's address in those packets.
        is_own: whether the address is this machine's own.
    """

    interface: str
    source: str
    is_own: bool = False


class InterfaceTarget(Record, kw_only=True):
    """A peer that this machine and others must reach, and that must reach this machine.

    Attributes:
        packed: the bytes of its numeric `address`.
        route: the route to it; None: there is none, and `why_not` says why.
    """

    name: str
    address: str
    packed: bytes
    route: Route | None
    why_not: str = ""

    @property
    def is_remote(self) -> bool:
        """Whether it is on another machine, as far as its address says."""
        return not is_loopback(self.address) and not (self.route is not None and self.route.is_own)
