"""Reads this machine's interfaces, addresses and routes from the kernel.

It uses netlink (rtnetlink(7)), which answers for this process's own network namespace. /sys may
show another namespace, so only speeds are read there, and only if the interface is the same.
Nothing is sent into the network. If netlink is forbidden, interfaces are unknown, except for their
IPv4 addresses, and routes are found through a socket.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from rallypoint.cluster.interface_facts import Address, Interface, InterfaceKind, Route

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, lengths, tos, table, protocol, scope, type, flags
_ATTRIBUTE = struct.Struct("=HH")
_REQUEST, _DUMP, _INTERRUPTED = 0x1, 0x300, 0x10
ERROR, DONE = 2, 3
_GETLINK, _GETADDR, _GETROUTE = 18, 22, 26
_ANSWER_BYTES = 1 << 18
_ATTEMPTS = 5  # an answer is interrupted when interfaces change

_IFLA_ADDRESS, _IFLA_NAME, _IFLA_MTU, _IFLA_MASTER, _IFLA_INFO, _IFLA_CARRIER = 1, 3, 4, 10, 18, 33
_INFO_KIND = 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_RTA_DST, _RTA_OIF = 1, 4
_IFF_UP = 0x1
_TENTATIVE, _FAILED, _DEPRECATED, _TEMPORARY = 0x40, 0x08, 0x20, 0x01
_SCOPE_LINK = 253
_LINK_NETWORK = bytes((169, 254))
_LOCAL = 2  # the type of a route
_SIOCGIFCONF, _MOST_IFREQS, _IFREQ_BYTES, _IFREQ_ADDRESS = 0x8912, 64, 40, 20  # netdevice(7)
_ANY_PORT = 9  # routes do not depend on it, but some kernels refuse 0

# The kinds of interface that connect containers and virtual machines to a bridge.
_ON_CONTAINER_BRIDGES = {"veth", "tun"}
_STACKED = ("vlan", "bond", "team", "macvlan", "macvtap", "ipvlan", "ipvtap", "vrf")
_TUNNELS = ("tun", "wireguard", "ipip", "sit", "ip6tnl", "gre", "gretap", "ip6gre", "ip6gretap",
            "vti", "vti6", "xfrm", "ppp", "erspan", "amt")  # fmt: skip
_DRIVERS = {
    "bridge": InterfaceKind.BRIDGE,
    "veth": InterfaceKind.VETH,
    "ipoib": InterfaceKind.INFINIBAND,
    **dict.fromkeys(_STACKED, InterfaceKind.STACKED),
    **dict.fromkeys(_TUNNELS, InterfaceKind.TUNNEL),
}
_HARDWARE = {
    772: InterfaceKind.LOOPBACK,
    32: InterfaceKind.INFINIBAND,
    512: InterfaceKind.TUNNEL,
    0xFFFE: InterfaceKind.TUNNEL,
}


def read_interfaces() -> tuple[Interface, ...]:
    """All interfaces of this network namespace; empty if the kernel does not say."""
    try:
        with _open() as kernel:
            links = [_read_link(body) for body in _dump(kernel, _GETLINK, bytes(_LINK.size))]
            addresses = map(_read_address, _dump(kernel, _GETADDR, bytes(_ADDRESS.size)))
            owned = [each for each in addresses if each is not None]
    except OSError:
        return ()
    on_bridge: dict[int, set[str]] = {}
    for link in links:
        on_bridge.setdefault(link.master, set()).add(link.driver)
    return tuple([_interface(link, owned, on_bridge.get(link.index, set())) for link in links])


def route_to(address: str) -> Route:
    """The route to a numeric address."""
    source = source_towards(address)
    try:
        with _open() as kernel:
            index, is_own = _asked_route(kernel, address)
    except OSError:  # to its own addresses, a machine sends from them
        return Route(interface="", source=source, is_own=source == address)
    names = dict(socket.if_nameindex())
    return Route(
        interface=names.get(index, ""), source=address if is_own else source, is_own=is_own
    )


def source_towards(address: str) -> str:
    """The address of this machine that packets to a numeric address carry.

    Connecting a datagram socket asks for the route and sends nothing.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])


def addresses_without_netlink() -> tuple[str, ...]:
    """The IPv4 addresses of this machine's interfaces, loopback among them; empty if unknown."""
    import array
    import fcntl

    entries = array.array("B", bytes(_IFREQ_BYTES * _MOST_IFREQS))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            wanted = struct.pack("@iP", len(entries), entries.buffer_info()[0])
            told = fcntl.ioctl(probe, _SIOCGIFCONF, wanted)
    except OSError:
        return ()
    (length,) = struct.unpack_from("@i", told)
    starts = range(_IFREQ_ADDRESS, length, _IFREQ_BYTES)
    return tuple([socket.inet_ntoa(entries[at : at + 4].tobytes()) for at in starts])


def default_interface() -> str:
    """The interface through which this machine reaches most others; empty if there is none.

    It is the interface of routes to the networks reserved for documentation (RFC 5737, RFC 3849).
    """
    for address in ("198.51.100.1", "2001:db8::1"):
        try:
            return route_to(address).interface
        except OSError:
            continue
    return ""


def _asked_route(kernel: socket.socket, address: str) -> tuple[int, bool]:
    """The number of the interface, and whether the address is this machine's own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    body = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
    body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _RTA_DST) + packed
    send_request(kernel, _GETROUTE, _REQUEST, body)
    for kind, _, answer in messages(kernel.recv(_ANSWER_BYTES)):
        if kind != ERROR:
            told = dict(attributes(answer[_ROUTE.size :]))
            return _number(told.get(_RTA_OIF, b"")), _ROUTE.unpack_from(answer)[7] == _LOCAL
    raise OSError("netlink refused")


class _Link:
    """One interface as the kernel describes it, without its addresses."""

    def __init__(self, index: int, hardware: int, flags: int, told: dict[int, bytes]) -> None:
        self.index = index
        self.hardware = hardware
        self.name = told.get(_IFLA_NAME, b"").rstrip(b"\0").decode(errors="replace")
        self.mtu = _number(told.get(_IFLA_MTU, b""))
        self.master = _number(told.get(_IFLA_MASTER, b""))
        self.mac = told.get(_IFLA_ADDRESS, b"")
        # This is not the operational state, which the kernel may update as much as a second later.
        self.is_up = bool(flags & _IFF_UP) and told.get(_IFLA_CARRIER) != b"\0"
        info = dict(attributes(told.get(_IFLA_INFO, b"")))
        self.driver = info.get(_INFO_KIND, b"").rstrip(b"\0").decode(errors="replace")


def _read_link(body: bytes) -> _Link:
    _, hardware, index, flags, _ = _LINK.unpack_from(body)
    return _Link(index, hardware, flags, dict(attributes(body[_LINK.size :])))


def _read_address(body: bytes) -> tuple[int, Address] | None:
    """The interface's number and its address; None: it cannot be used yet, or ever."""
    family, prefix, flags, scope, index = _ADDRESS.unpack_from(body)
    told = dict(attributes(body[_ADDRESS.size :]))
    # In a tunnel, the second is the other end's.
    packed = told.get(_IFA_LOCAL) or told.get(_IFA_ADDRESS, b"")
    flags = _number(told.get(_IFA_FLAGS, b"")) or flags
    if family not in (socket.AF_INET, socket.AF_INET6) or flags & (_TENTATIVE | _FAILED):
        return None
    is_6 = family == socket.AF_INET6
    return index, Address(
        text=socket.inet_ntop(family, packed),
        packed=packed,
        prefix=prefix,
        is_link_only=scope == _SCOPE_LINK if is_6 else packed.startswith(_LINK_NETWORK),
        is_passing=is_6 and bool(flags & (_DEPRECATED | _TEMPORARY)),
    )


def _interface(link: _Link, owned: list[tuple[int, Address]], on_it: set[str]) -> Interface:
    kind = _kind(link, on_it)
    addresses = tuple([address for index, address in owned if index == link.index])
    has_speed = bool(addresses) and kind in (
        InterfaceKind.PHYSICAL,
        InterfaceKind.INFINIBAND,
        InterfaceKind.STACKED,
    )
    return Interface(
        name=link.name,
        index=link.index,
        kind=kind,
        is_up=link.is_up,
        mtu=link.mtu,
        speed_mbps=_speed_mbps(link) if has_speed else None,
        addresses=addresses,
    )


def _kind(link: _Link, on_it: set[str]) -> InterfaceKind:
    if link.driver == "bridge" and on_it.issubset(_ON_CONTAINER_BRIDGES):
        return InterfaceKind.CONTAINER_BRIDGE
    if link.driver:
        return _DRIVERS.get(link.driver, InterfaceKind.OTHER)
    return _HARDWARE.get(link.hardware, InterfaceKind.PHYSICAL)


def _speed_mbps(link: _Link) -> int | None:
    """The speed that the driver reports; None: unknown, or /sys shows another namespace."""
    directory = f"/sys/class/net/{link.name}"
    mac = ":".join(f"{byte:02x}" for byte in link.mac)
    try:
        if (_line(f"{directory}/ifindex"), _line(f"{directory}/address")) != (str(link.index), mac):
            return None
        speed = int(_line(f"{directory}/speed"))
    except (OSError, ValueError):
        return None
    return speed if 0 < speed < 1 << 31 else None


def _line(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


# The wire format.


def _open() -> socket.socket:
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    return socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)


def send_request(kernel: socket.socket, kind: int, flags: int, body: bytes) -> None:
    """Send one request of that type."""
    kernel.sendall(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)


def _dump(kernel: socket.socket, kind: int, body: bytes) -> list[bytes]:
    """The bodies of all messages of an answer."""
    found: list[bytes] = []
    for _ in range(_ATTEMPTS):
        found, is_whole, is_done = [], True, False
        send_request(kernel, kind, _REQUEST | _DUMP, body)
        while not is_done:
            for answer, flags, text in messages(kernel.recv(_ANSWER_BYTES)):
                if answer == ERROR:
                    raise OSError(-int(struct.unpack_from("=i", text)[0]), "netlink refused")
                is_whole = is_whole and not flags & _INTERRUPTED
                is_done = is_done or answer == DONE
                if answer != DONE:
                    found.append(text)
        if is_whole:
            break
    return found


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The type, flags and body of each message of a datagram."""
    while len(data) >= _HEADER.size:
        length, kind, flags, _, _ = _HEADER.unpack_from(data)
        if length < _HEADER.size:
            return
        yield kind, flags, data[_HEADER.size : length]
        data = data[_padded(length) :]


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The type and contents of each attribute."""
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        yield kind & 0x3FFF, data[_ATTRIBUTE.size : length]
        data = data[_padded(length) :]


def _padded(length: int) -> int:
    return (length + 3) & ~3


def _number(data: bytes) -> int:
    """A number as this machine writes it; 0 if there is none."""
    return int.from_bytes(data, "little" if struct.pack("=H", 1)[0] else "big")
