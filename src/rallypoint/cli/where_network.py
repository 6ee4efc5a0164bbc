"""This machine's interfaces, as `rallypoint where` shows them, and which one a job would use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.cluster.interface import choose_network
from rallypoint.cluster.interface_facts import Interface
from rallypoint.cluster.netlink import read_interfaces


def network_text(hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """A table of all interfaces, and what would be chosen to meet others at `hosts`, and why."""
    table = interface_table(read_interfaces())
    try:
        choice = choose_network(hosts, environ)
    except (HostError, InvalidArgumentError) as error:
        return f"{table}\nNo interface for a job of several nodes: {error}"
    return f"{table}\nFor a job of several nodes: {choice.told}"


def interface_table(interfaces: Sequence[Interface]) -> str:
    """One line for each, aligned."""
    head = ("interface", "addresses", "kind", "speed and MTU")
    rows = [
        head,
        *[(each.name, _addresses(each), each.kind.value, each.rate) for each in interfaces],
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _addresses(interface: Interface) -> str:
    if not interface.is_up:
        return "down"
    return ", ".join(f"{each.text}/{each.prefix}" for each in interface.addresses) or "none"
