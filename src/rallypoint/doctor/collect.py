"""Collects facts about this node within a few seconds, even if a name or path hangs.

Names, paths and disks are examined in parallel, with time limits (here); everything else is read
from the kernel's files (machine.py).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.base.errors import RallypointError
from rallypoint.cluster.interface import choose_network, own_addresses
from rallypoint.cluster.netlink import read_interfaces
from rallypoint.cluster.network import (
    IFNAME_VARIABLES,
    UnknownHostError,
    addresses_of,
    can_bind,
    is_own_name,
)
from rallypoint.doctor.cluster_facts import (
    AddressFact,
    InterfaceFact,
    Lookup,
    NodeFacts,
    PathLook,
    PathState,
    Port,
)
from rallypoint.doctor.machine import (
    disk_places,
    look_at_devices,
    look_at_disk,
    look_at_limits,
    look_at_settings,
    look_at_versions,
    proxy_bypasses,
)
from rallypoint.doctor.paths import look_at_path

T = TypeVar("T")

NAME_S = 2.0  # limit for the name service
_LOOK_S = 3.0  # limit for a path or a disk


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOrder:
    """What to examine.

    Attributes:
        number, name: the node's; if the name is empty, its host name is used.
        hosts: names of the other nodes and of endpoints.
        paths: those that --path names; `script`: the program, whose digest is taken; empty if
            unknown.
        log_dir: as in --log-dir.
        local_addr: as in --local-addr.
        workers: as in --nproc-per-node.
        endpoints: those that must be free for this node to listen at, if they are on it.
        secret: what nodes that probe it must know; empty: none does.
        environ, directory: of the job, which are set up first; empty where this node has them
            already, as it was not reached by ssh.
        port_range: as in --port-range.
    """

    number: int = 0
    name: str = ""
    hosts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    script: str = ""
    log_dir: str = ""
    local_addr: str = ""
    workers: str = ""
    endpoints: tuple[tuple[str, int], ...] = ()
    secret: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""
    port_range: str = ""


def look(order: LookOrder, environ: Mapping[str, str]) -> NodeFacts:
    """All facts about this node except those that the caller adds: its ports, its surroundings, its
    jobs.
    """
    paths = [(path, False) for path in order.paths]
    paths += [(order.script, True)] if order.script else []
    places = disk_places(environ, order.log_dir)
    path_looks = begin(
        [partial(look_at_path, path, is_script=is_script) for path, is_script in paths], _LOOK_S
    )
    disk_looks = begin([partial(look_at_disk, *place) for place in places], _LOOK_S)
    versions = look_at_versions()
    facts = look_at_network(order.number, order.hosts, environ, NAME_S, local_addr=order.local_addr)
    looked, disks = path_looks(), disk_looks()
    silent = [path or "/tmp" for at, (_, path) in enumerate(places) if at not in disks]
    return replace(
        facts,
        name=order.name or facts.name,
        versions=versions,
        bypasses_proxy=proxy_bypasses(environ, [each.host for each in facts.names]),
        devices=look_at_devices(environ),
        workers=order.workers,
        limits=look_at_limits(),
        disks=tuple(each for _, each in sorted(disks.items()) if each is not None),
        paths=(
            *(
                looked.get(at) or PathLook(path=path, state=PathState.HANGS, is_script=is_script)
                for at, (path, is_script) in enumerate(paths)
            ),
            *(PathLook(path=path, state=PathState.HANGS) for path in silent),
        ),
    )


def look_at_network(
    number: int,
    hosts: Sequence[str],
    environ: Mapping[str, str],
    name_s: float,
    *,
    local_addr: str = "",
) -> NodeFacts:
    """Only the facts about names and interfaces, as for an error that is about to be raised.

    Args:
        name_s: limit for the name service.
    """
    name = os.uname().nodename
    hosts = tuple(dict.fromkeys(hosts))
    names = dict.fromkeys([name, *hosts, *([local_addr] if local_addr else [])])
    lookups = {each.host: each for each in look_up_all([*names], name_s)}
    return NodeFacts(
        number=number,
        name=name,
        own_name=lookups[name],
        names=tuple(lookups[host] for host in hosts),
        addresses=own_addresses(),
        interfaces=tuple(
            InterfaceFact(
                name=each.name,
                addresses=tuple(one.text for one in each.addresses if not one.is_link_only),
                mtu=each.mtu,
                speed_mbps=max(0, each.speed_mbps or 0),
            )
            for each in read_interfaces()
            if each.is_useful
        ),
        choice=choose(hosts, environ, lookups, local_addr),
        settings=look_at_settings(environ),
    )


def begin(work: Sequence[Callable[[], T]], wait_s: float | None) -> Callable[[], dict[int, T]]:
    """Begin all of this work, each part in a thread of its own.

    Returns:
        A function that waits for the results until `wait_s` after the beginning, and returns them
        by their positions in `work`, without those of parts that hang.
    """
    found: dict[int, T] = {}

    def do(position: int) -> None:
        found[position] = work[position]()

    threads = [
        threading.Thread(target=do, args=(position,), daemon=True) for position in range(len(work))
    ]
    for thread in threads:
        thread.start()
    until = None if wait_s is None else time.monotonic() + wait_s

    def results() -> dict[int, T]:
        for thread in threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        return dict(found)

    return results


def look_up(host: str, wait_s: float = NAME_S) -> Lookup:
    """Resolve a name, within a time limit."""
    return look_up_all([host], wait_s)[0]


def look_up_all(hosts: Sequence[str], wait_s: float) -> tuple[Lookup, ...]:
    """Resolve names, all at once, within one time limit: a name service may hang."""
    found = begin([partial(_resolve, host) for host in hosts], wait_s)()
    silent = f"the name service does not answer within {wait_s:g} s"
    return tuple(
        found.get(position) or Lookup(host=host, error=silent)
        for position, host in enumerate(hosts)
    )


def _resolve(host: str) -> Lookup:
    try:
        return Lookup(host=host, addresses=tuple(addresses_of(host)))
    except RallypointError as error:
        text = str(error)  # the system's error text is in brackets
        why = text[text.find("(") + 1 : text.find(")")] if "(" in text else text
        return Lookup(host=host, error=why)


def is_this_node(lookup: Lookup) -> bool:
    """Whether a name is this machine's: by its names, or because it can bind the address."""
    return is_own_name(lookup.host) or any(can_bind(address) for address in lookup.addresses)


def choose(
    hosts: Sequence[str],
    environ: Mapping[str, str],
    lookups: Mapping[str, Lookup],
    local_addr: str = "",
) -> AddressFact:
    """The address that a job on this node would give to nodes that meet at `hosts`, and why.

    Args:
        lookups: what the names resolve to; no name service is asked.
    """

    def addresses(host: str) -> list[str]:
        found = lookups[host]
        if found.error:
            raise UnknownHostError(f"cannot find the host {host!r} ({found.error})")
        return list(found.addresses)

    by = next((f"{name}={environ[name]}" for name in IFNAME_VARIABLES if environ.get(name)), "")
    by = f"--local-addr {local_addr}" if local_addr else by
    # Unknown names are reported separately.
    others = [
        host
        for host in hosts
        if not is_loopback(host) and not is_own_name(host) and not lookups[host].error
    ]
    error = ""
    for towards in (*([host] for host in others), []):
        try:
            chosen = choose_network(
                towards, environ, local_addr=local_addr or None, look_up=addresses
            )
        except RallypointError as refusal:
            error = error or str(refusal)
            continue
        return AddressFact(address=chosen.address, interface=chosen.name, by=by)
    return AddressFact(by=by, error=error)


def take_ports(
    facts: NodeFacts, endpoints: Sequence[tuple[str, int]], listen: Callable[[int], None]
) -> NodeFacts:
    """Listen at the endpoints that are on this node; note why that is impossible, and the programs
    that already do.
    """
    from rallypoint.store.port_holder import holder_of

    ports = list(facts.ports)
    for host, port in endpoints:
        found = Port(endpoint=endpoint_of(host, port))
        try:
            listen(port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                found = replace(found, held_by=holder_of(port))
            else:
                found = replace(found, error=error.strerror or str(error))
        ports.append(found)
    return replace(facts, ports=tuple(ports))
