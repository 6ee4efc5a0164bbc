"""The CPUs on which each worker runs: --numa-binding's four modes, with torchrun's meanings.

`Topology` describes the machine, `read_topology` reads it, and `bind` decides; only `read_topology`
accesses the system. Without GPUs, which torchrun refuses, workers are spread evenly over the NUMA
nodes in the order of their local ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.files import read_text
from rallypoint.cluster.devices import gpu_numa_nodes, list_names

MODES = ("node", "socket", "exclusive", "core-complex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The CPUs and GPUs of a machine.

    Attributes:
        nodes: by NUMA node, the CPUs that this process may use; nodes without any are left out.
        sockets, cores, caches: by CPU, a number that it shares with the other CPUs of its socket,
            its physical core, or its last-level cache.
        gpus: the NUMA node of each GPU; -1 if unknown.
    """

    nodes: Mapping[int, frozenset[int]]
    sockets: Mapping[int, int]
    cores: Mapping[int, int]
    caches: Mapping[int, int]
    gpus: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Binding:
    """The CPUs of each local rank; `note` says what the user should know about them."""

    cpus: tuple[frozenset[int], ...]
    note: str = ""


def bind(mode: str, topology: Topology, workers: int) -> Binding:
    """Decide on which CPUs each worker runs."""
    if mode not in MODES:
        raise InvalidArgumentError(
            f"--numa-binding is {mode!r}; it must be one of {', '.join(MODES)}."
        )
    nodes = sorted(topology.nodes)
    homes = [_home(local_rank, workers, nodes, topology.gpus) for local_rank in range(workers)]
    cpus = []
    for local_rank, home in enumerate(homes):
        peers = [rank for rank, other in enumerate(homes) if other == home]
        cpus.append(_cpus(mode, topology, home, index=peers.index(local_rank), count=len(peers)))
    everything = frozenset().union(*topology.nodes.values())
    note = ""
    if all(each == everything for each in cpus):
        note = (
            f"--numa-binding {mode} changes nothing here: each worker's part of this machine is all"
            f" of its {len(everything)} CPUs."
        )
    elif not topology.gpus:
        note = "--numa-binding: there are no GPUs here, so workers are spread over the NUMA nodes."
    return Binding(tuple(cpus), note)


def _home(local_rank: int, workers: int, nodes: Sequence[int], gpus: Sequence[int]) -> int:
    """The NUMA node of one worker."""
    if local_rank < len(gpus) and gpus[local_rank] in nodes:
        return gpus[local_rank]
    return nodes[local_rank * len(nodes) // workers]


def _cpus(mode: str, topology: Topology, home: int, *, index: int, count: int) -> frozenset[int]:
    """The CPUs of the worker with that index among `count` workers on NUMA node `home`."""
    own = topology.nodes[home]
    match mode:
        case "node":
            return own
        case "socket":
            sockets = {topology.sockets[cpu] for cpu in own}
            everything = frozenset().union(*topology.nodes.values())
            return frozenset(cpu for cpu in everything if topology.sockets[cpu] in sockets)
        case "core-complex":
            # The largest groups come first; if there are more workers than groups, workers share
            # them.
            caches = _groups(own, topology.caches.__getitem__)
            caches.sort(key=lambda group: (-len(group), min(group)))
            return caches[index % len(caches)]
    cores = _groups(own, topology.cores.__getitem__)
    each, more = divmod(len(cores), count)
    if each == 0:
        raise InvalidArgumentError(
            f"--numa-binding exclusive: NUMA node {home} has {len(cores)} cores for {count} "
            "workers; start fewer workers, or choose another mode."
        )
    first = index * each + min(index, more)
    return frozenset().union(*cores[first : first + each + (index < more)])


def _groups(cpus: frozenset[int], key: Callable[[int], int]) -> list[frozenset[int]]:
    found: dict[int, set[int]] = {}
    for cpu in sorted(cpus):
        found.setdefault(key(cpu), set()).add(cpu)
    return [frozenset(group) for group in found.values()]


def read_topology(environ: Mapping[str, str], root: str = "") -> Topology:
    """Read this machine's topology. `root` is for tests."""
    allowed = os.sched_getaffinity(0)
    base = f"{root}/sys/devices/system"
    nodes: dict[int, frozenset[int]] = {}
    for name in list_names(f"{base}/node"):
        if name.startswith("node") and name[4:].isdigit():
            cpus = frozenset(parse_cpus(read_text(f"{base}/node/{name}/cpulist")) & allowed)
            if cpus:
                nodes[int(name[4:])] = cpus
    if not nodes:  # a kernel without NUMA
        nodes[0] = frozenset(allowed)
    everything = frozenset().union(*nodes.values())
    topology = {cpu: f"{base}/cpu/cpu{cpu}/topology" for cpu in everything}
    return Topology(
        nodes=nodes,
        sockets={
            cpu: _socket(read_text(f"{topology[cpu]}/physical_package_id")) for cpu in everything
        },
        cores={cpu: _first(f"{topology[cpu]}/thread_siblings_list", cpu) for cpu in everything},
        caches={cpu: _last_cache(f"{base}/cpu/cpu{cpu}/cache", cpu) for cpu in everything},
        gpus=gpu_numa_nodes(environ, root),
    )


def parse_cpus(text: str) -> set[int]:
    """Parse a list of CPUs as the kernel writes it: ``"0-3,8"``."""
    found: set[int] = set()
    for item in text.strip().split(","):
        first, _, last = item.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found


def _socket(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


def _first(path: str, cpu: int) -> int:
    """The lowest CPU that a file lists, used as the group's number."""
    return min(parse_cpus(read_text(path)), default=cpu)


def _last_cache(directory: str, cpu: int) -> int:
    levels = {}
    for name in list_names(directory):
        path = f"{directory}/{name}"
        if name.startswith("index") and read_text(f"{path}/type").strip() in ("Unified", "Data"):
            levels[read_text(f"{path}/level").strip()] = f"{path}/shared_cpu_list"
    return _first(levels[max(levels, key=int)], cpu) if levels else cpu
