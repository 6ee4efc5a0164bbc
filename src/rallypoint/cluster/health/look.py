"""Collects facts about this node within a few seconds, even if a name or path hangs.

Names and paths are examined in parallel, each with its own time limit; everything else is read from
the kernel's files. The files' root is an argument where tests need it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.base.errors import RallypointError
from rallypoint.cluster.health.facts import (
    Choice,
    Disk,
    Lookup,
    NodeFacts,
    PathLook,
    PathState,
    Port,
)
from rallypoint.cluster.health.machine import look_at_devices, look_at_disks, look_at_limits
from rallypoint.cluster.health.network import look_at_interfaces
from rallypoint.cluster.health.paths import look_at_path
from rallypoint.cluster.health.settings import look_at_settings, proxy_bypasses
from rallypoint.cluster.health.versions import look_at_versions
from rallypoint.cluster.interface import choose_network, own_addresses
from rallypoint.cluster.network import (
    IFNAME_VARIABLES,
    UnknownHostError,
    addresses_of,
    can_bind,
    is_own_name,
)

T = TypeVar("T")

NAME_S = 2.0  # limit for a name service


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
    own_name = _begin(begun, lambda: look_up(host))
    lookups = [_begin(begun, lambda name=name: look_up(name)) for name in names]  # type: ignore[misc]
    looks: list[list[PathLook]] = [
        _begin(begun, lambda path=path, script=script: look_at_path(path, is_script=script))  # type: ignore[misc]
        for path, script in paths
    ]
    disks: list[list[tuple[Disk, ...]]] = [
        _begin(begun, lambda: look_at_disks(environ, order.log_dir))
    ]
    versions = look_at_versions()
    for wait in begun:
        wait()
    found = tuple(each[0] for each in lookups if each)
    return NodeFacts(
        number=order.number,
        name=order.name or host,
        own_name=own_name[0] if own_name else Lookup(host=host, error=_SILENT),
        names=found,
        addresses=own_addresses(),
        interfaces=look_at_interfaces(),
        choice=choose(order.hosts, environ, order.local_addr),
        ports=order.ports,
        versions=versions,
        settings=look_at_settings(environ),
        bypasses_proxy=proxy_bypasses(environ, names),
        devices=look_at_devices(environ),
        workers=order.workers,
        limits=look_at_limits(),
        disks=tuple(disk for each in disks for disk in (each[0] if each else ())),
        paths=tuple(
            each[0] if each else PathLook(path=path, state=PathState.HANGS, is_script=script)
            for each, (path, script) in zip(looks, paths, strict=True)
        ),
    )


def look_at_network(
    number: int, hosts: Sequence[str], environ: Mapping[str, str], local_addr: str = ""
) -> NodeFacts:
    """Only the facts about names and interfaces, for an error that is about to be raised."""
    name = os.uname().nodename
    begun: list[Callable[[], None]] = []
    own_name = _begin(begun, lambda: look_up(name))
    lookups = [_begin(begun, lambda host=host: look_up(host)) for host in dict.fromkeys(hosts)]  # type: ignore[misc]
    for wait in begun:
        wait()
    return NodeFacts(
        number=number,
        name=name,
        own_name=own_name[0] if own_name else Lookup(host=name, error=_SILENT),
        names=tuple(each[0] for each in lookups if each),
        addresses=own_addresses(),
        interfaces=look_at_interfaces(),
        choice=choose(hosts, environ, local_addr),
        settings=look_at_settings(environ),
    )


_SILENT = f"the name service does not answer within {NAME_S:g} s"


def look_up(host: str) -> Lookup:
    """Resolve a name on this node."""
    found: list[Lookup] = []

    def ask() -> None:
        try:
            found.append(Lookup(host=host, addresses=tuple(addresses_of(host))))
        except RallypointError as error:
            found.append(Lookup(host=host, error=_why(error)))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(NAME_S)
    return found[0] if found else Lookup(host=host, error=_SILENT)


def _why(error: RallypointError) -> str:
    """The system's error text, which is in brackets."""
    text = str(error)
    return text[text.find("(") + 1 : text.find(")")] if "(" in text else text


def _begin(begun: list[Callable[[], None]], work: Callable[[], T]) -> list[T]:
    """Run `work` in a thread; the returned list has its result once the function added to `begun`
    has returned.
    """
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    begun.append(lambda: thread.join(2 * NAME_S))
    return found


def choose(hosts: Sequence[str], environ: Mapping[str, str], local_addr: str = "") -> Choice:
    """The address that a job on this node would give to nodes that meet at `hosts`, and why."""
    by = next((f"{name}={environ[name]}" for name in IFNAME_VARIABLES if environ.get(name)), "")
    by = f"--local-addr {local_addr}" if local_addr else by
    others = [host for host in hosts if not is_loopback(host) and not is_own_name(host)]
    error = ""
    for towards in (*([host] for host in others), []):
        try:
            chosen = choose_network(towards, environ, local_addr=local_addr or None)
        except UnknownHostError:
            continue  # reported separately
        except RallypointError as refusal:
            error = error or str(refusal)
            continue
        return Choice(address=chosen.address, interface=chosen.name, by=by)
    return Choice(by=by, error=error)


def take_ports(
    facts: NodeFacts, endpoints: Sequence[tuple[str, int]], listen: Callable[[int], None]
) -> NodeFacts:
    """Listen at the endpoints that are on this node; note the programs that already do."""
    from rallypoint.store.port_holder import holder_of

    ports = list(facts.ports)
    for host, port in endpoints:
        try:
            listen(port)
            held_by = ""
        except OSError:
            held_by = holder_of(port)
        ports.append(Port(endpoint=endpoint_of(host, port), held_by=held_by))
    return replace(facts, ports=tuple(ports))


def is_this_node(host: str) -> bool:
    """Whether an endpoint's host is this machine, as far as can be found out within the time
    limit.
    """
    return is_own_name(host) or any(can_bind(address) for address in look_up(host).addresses)
