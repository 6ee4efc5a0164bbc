"""Collects facts about this node within a few seconds, even if a name or path hangs.

Names, paths and disks are examined in parallel, with time limits; everything else is read from the
kernel's files. The files' root is an argument where tests need it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.base.errors import RallypointError
from rallypoint.cluster.interface import choose_network, own_addresses
from rallypoint.cluster.network import (
    IFNAME_VARIABLES,
    UnknownHostError,
    is_own_name,
)
from rallypoint.doctor.cluster_facts import (
    AddressFact,
    Disk,
    Lookup,
    NodeFacts,
    PathLook,
    PathState,
    Port,
)
from rallypoint.doctor.installed import look_at_versions
from rallypoint.doctor.lookups import NAME_S, look_up_all
from rallypoint.doctor.machine import (
    disk_places,
    look_at_devices,
    look_at_disk,
    look_at_limits,
)
from rallypoint.doctor.own_interfaces import look_at_interfaces
from rallypoint.doctor.paths import look_at_path
from rallypoint.doctor.settings import look_at_settings, proxy_bypasses

T = TypeVar("T")

_LOOK_S = 3.0  # limit for a path or a disk


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOrder:
    """What to examine.

    Attributes:
        number, name: the node's; if the name is empty, its host name is used.
        hosts: names of the other nodes and of endpoints.
        ports: endpoints, as HOST:PORT, at which this node is to listen.
        paths: those that --path names; `script`: the program, whose digest is taken; empty if
            unknown.
        log_dir: as in --log-dir.
        local_addr: as in --local-addr.
        workers: as in --nproc-per-node.
    """

    number: int = 0
    name: str = ""
    hosts: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()
    paths: tuple[str, ...] = ()
    script: str = ""
    log_dir: str = ""
    local_addr: str = ""
    workers: str = ""


def look(order: LookOrder, environ: Mapping[str, str]) -> NodeFacts:
    """All facts about this node except those that the caller adds: its ports, its surroundings, its
    jobs.
    """
    host = os.uname().nodename
    names = tuple(dict.fromkeys([*order.hosts]))
    paths = [(path, False) for path in order.paths]
    paths += [(order.script, True)] if order.script else []
    begun: list[Callable[[], None]] = []
    looks: list[list[PathLook]] = [
        _begin(begun, lambda path=path, script=script: look_at_path(path, is_script=script))  # type: ignore[misc]
        for path, script in paths
    ]
    places = disk_places(environ, order.log_dir)
    disks: list[list[Disk | None]] = [
        _begin(begun, lambda place=place: look_at_disk(place))  # type: ignore[misc]
        for place in places
    ]
    versions = look_at_versions()
    own_name, lookups = _look_up(host, names, order.local_addr, NAME_S)
    for wait in begun:
        wait()
    hung = [place.likely_path for place, found in zip(places, disks, strict=True) if not found]
    return NodeFacts(
        number=order.number,
        name=order.name or host,
        own_name=own_name,
        names=tuple(lookups[name] for name in names),
        addresses=own_addresses(),
        interfaces=look_at_interfaces(),
        choice=choose(names, environ, lookups, order.local_addr),
        ports=order.ports,
        versions=versions,
        settings=look_at_settings(environ),
        bypasses_proxy=proxy_bypasses(environ, names),
        devices=look_at_devices(environ),
        workers=order.workers,
        limits=look_at_limits(),
        disks=tuple(each[0] for each in disks if each and each[0] is not None),
        paths=(
            *(
                each[0] if each else PathLook(path=path, state=PathState.HANGS, is_script=script)
                for each, (path, script) in zip(looks, paths, strict=True)
            ),
            *(PathLook(path=path, state=PathState.HANGS) for path in hung),
        ),
    )


def look_at_network(
    number: int, hosts: Sequence[str], environ: Mapping[str, str], name_s: float
) -> NodeFacts:
    """Only the facts about names and interfaces, for an error that is about to be raised.

    Args:
        name_s: limit for the name service.
    """
    name = os.uname().nodename
    hosts = tuple(dict.fromkeys(hosts))
    own_name, lookups = _look_up(name, hosts, "", name_s)
    return NodeFacts(
        number=number,
        name=name,
        own_name=own_name,
        names=tuple(lookups[host] for host in hosts),
        addresses=own_addresses(),
        interfaces=look_at_interfaces(),
        choice=choose(hosts, environ, lookups),
        settings=look_at_settings(environ),
    )


def _look_up(
    own_name: str, hosts: Sequence[str], local_addr: str, wait_s: float
) -> tuple[Lookup, dict[str, Lookup]]:
    """This host's name, and by name all others that are needed."""
    names = list(dict.fromkeys([own_name, *hosts, *([local_addr] if local_addr else [])]))
    found = {each.host: each for each in look_up_all(names, wait_s)}
    return found[own_name], found


def _begin(begun: list[Callable[[], None]], work: Callable[[], T]) -> list[T]:
    """Run `work` in a thread; the returned list has its result once the function added to `begun`
    has returned, unless the work hangs.
    """
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    until = time.monotonic() + _LOOK_S
    begun.append(lambda: thread.join(max(0.0, until - time.monotonic())))
    return found


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
