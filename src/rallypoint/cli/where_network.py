"""This machine's interfaces, as `rallypoint where` shows them, and the one that a job would use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.cluster.interface import choose_network, targets_of
from rallypoint.cluster.interface_facts import Interface, InterfaceTarget
from rallypoint.cluster.netlink import read_interfaces


def network_text(hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """All interfaces, the routes to `hosts`, and the choice for meeting others there."""
    parts = [interface_table(read_interfaces())]
    if hosts:
        parts.append(route_table({host: _targets_of(host) for host in hosts}))
    try:
        parts.append(f"For a job of several nodes: {choose_network(hosts, environ).told}")
    except (HostError, InvalidArgumentError) as error:
        parts.append(f"No interface for a job of several nodes: {error}")
    return "\n".join(parts)


def interface_table(interfaces: Sequence[Interface]) -> str:
    """One line for each interface."""
    return _table(
        [
            ("interface", "addresses", "kind", "speed and MTU"),
            *[(each.name, _addresses(each), each.kind.value, each.rate) for each in interfaces],
        ]
    )


def route_table(targets: Mapping[str, Sequence[InterfaceTarget]]) -> str:
    """One line for each address of each host; a host that cannot be resolved has none."""
    rows = [("towards", "address", "interface", "from")]
    for host, ways in targets.items():
        for each in ways:
            if each.route is None:
                rows.append((host, each.address, "no route", each.why_not))
            else:
                how = "this machine's own" if each.route.is_own else each.route.source
                rows.append((host, each.address, each.route.interface or "?", how))
        if not ways:
            rows.append((host, "not known", "", ""))
    return _table(rows)


def _targets_of(host: str) -> list[InterfaceTarget]:
    try:
        return targets_of(host)
    except HostError:
        return []


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _addresses(interface: Interface) -> str:
    if not interface.is_up:
        return "down"
    return ", ".join(f"{each.text}/{each.prefix}" for each in interface.addresses) or "none"
