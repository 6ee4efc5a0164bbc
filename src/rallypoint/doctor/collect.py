"""Collects facts about this node within a few seconds, even if a name or path hangs.

Names, paths and disks are examined in parallel, with time limits. Everything else is read from the
kernel's files, whose root is an argument where tests need it.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.base.errors import RallypointError
from rallypoint.base.files import read_text
from rallypoint.cluster.devices import count_gpus, gpu_models, list_names
from rallypoint.cluster.netlink import read_interfaces
from rallypoint.cluster.network import (
    IFNAME_VARIABLES,
    UnknownHostError,
    addresses_of,
    can_bind,
    choose_network,
    is_own_name,
    own_addresses,
)
from rallypoint.doctor.cluster_facts import (
    DRIVER,
    PROXIES,
    SHM,
    AddressFact,
    DeviceFacts,
    Disk,
    InterfaceFact,
    Lookup,
    NodeFacts,
    PathLook,
    PathState,
    Port,
    ProcessLimits,
    Usage,
)
from rallypoint.doctor.paths import look_at_path

T = TypeVar("T")

NAME_S = 2.0  # limit for the name service
_LOOK_S = 3.0  # limit for a path or a disk
_PACKAGES = {"Rallypoint": "rallypoint", "NumPy": "numpy", "PyTorch": "torch"}
# Prefixes of distribution names: what follows is CUDA's version.
_NVIDIA = {"NCCL": "nvidia-nccl", "CUDA": "nvidia-cuda-runtime"}
# The environment variables that the checks read. Secrets and passwords are not among them.
_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_BLOCKING_WAIT",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "RALLYPOINT_SOCKET_IFNAME",
    "TORCH_NCCL_BLOCKING_WAIT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOrder:
    """What to examine.

    Attributes:
        number, name: the node's; if the name is empty, its host name is used.
        hosts: names of the other nodes and of endpoints.
        paths: those that --path names; `script`: the program, whose digest is taken; empty if
            unknown.
        workers: as in --nproc-per-node.
        endpoints: those that must be free for this node to listen at, if they are on it.
        secret: what nodes that probe it must know; empty: none does.
        environ, directory: of the job, which are set up first; empty where this node has them
            already, as it was not reached by ssh.
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
    """All facts about this node except those that the caller adds: ports, surroundings, jobs."""
    paths = [(path, False) for path in order.paths]
    paths += [(order.script, True)] if order.script else []
    where = disk_paths(environ, order.log_dir)
    path_looks = begin(
        [partial(look_at_path, path, is_script=is_script) for path, is_script in paths], _LOOK_S
    )
    disk_looks = begin([partial(look_at_disk, *each) for each in where], _LOOK_S)
    versions = look_at_versions()
    facts = look_at_network(order.number, order.hosts, environ, NAME_S, local_addr=order.local_addr)
    looked, disks = path_looks(), disk_looks()
    silent = [path or "/tmp" for at, (_, path) in enumerate(where) if at not in disks]
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
    """Only the facts about names and interfaces; `name_s` limits the name service."""
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
    """Begin all of this work, each part in its own thread.

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
    """The address that a job here would give to nodes whose rendezvous is at `hosts`, by these
    lookups.
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
    """Listen at these endpoints of this node; note why that is impossible, and which process
    does.
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


# What this machine has.


def look_at_devices(environ: Mapping[str, str], root: str = "") -> DeviceFacts:
    """This node's GPUs and InfiniBand devices, and its usable CPUs."""
    cpus = float(len(os.sched_getaffinity(0)))
    quota = cpu_quota(root)
    return DeviceFacts(
        gpus=count_gpus({}, root),
        visible=count_gpus(environ, root),
        models=gpu_models(root),
        has_infiniband=bool(list_names(f"{root}/sys/class/infiniband")),
        cpus=min(cpus, quota) if quota else cpus,
    )


def cpu_quota(root: str = "") -> float:
    """The number of CPUs that the control group may use; 0 if unlimited."""
    quota, _, period = read_text(f"{root}/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not quota:
        quota = read_text(f"{root}/sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
        period = read_text(f"{root}/sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    is_set = quota.isdigit() and period.isdigit() and int(period)
    return int(quota) / int(period) if is_set else 0.0


def look_at_limits(root: str = "") -> ProcessLimits:
    """The limits of this process, and of this machine's network."""
    return ProcessLimits(
        open_files=_hard(resource.RLIMIT_NOFILE),
        memlock_bytes=_hard(resource.RLIMIT_MEMLOCK),
        # The superuser's processes are not counted.
        processes=_hard(resource.RLIMIT_NPROC) if os.geteuid() else -1,
        memory=_memory(root),
        pids=Usage(
            used=_number(f"{root}/sys/fs/cgroup/pids.current"),
            most=_number(f"{root}/sys/fs/cgroup/pids.max"),
        ),
        conntrack=Usage(
            used=_number(f"{root}/proc/sys/net/netfilter/nf_conntrack_count"),
            most=_number(f"{root}/proc/sys/net/netfilter/nf_conntrack_max"),
        ),
        ports=_ports(root),
        tcp_pages=_tcp_pages(root),
        somaxconn=_number(f"{root}/proc/sys/net/core/somaxconn") or ProcessLimits().somaxconn,
        congestion_control=read_text(f"{root}/proc/sys/net/ipv4/tcp_congestion_control").strip(),
    )


def disk_paths(environ: Mapping[str, str], log_dir: str = "") -> list[tuple[str, str]]:
    """What a job writes to, and its path; empty: Python's default, which may take long to find."""
    temporary = ("the directory for temporary files", environ.get("TMPDIR", ""))
    return [(SHM, SHM), temporary, *([("--log-dir", log_dir)] if log_dir else [])]


def look_at_disk(what: str, path: str) -> Disk | None:
    """The file system of that path; None if it cannot be examined. It may hang."""
    try:
        path = _existing(path or tempfile.gettempdir())
        space, device = os.statvfs(path), os.stat(path).st_dev
    except OSError:
        return None
    return Disk(
        what=what,
        path=path,
        device=str(device),
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
        has_inodes=not space.f_files or space.f_favail > 0,
    )


def _existing(path: str) -> str:
    """The directory itself, or its nearest ancestor that exists."""
    path = os.path.abspath(path)
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _hard(kind: int) -> int:
    """The hard limit, up to which a process may raise its limit."""
    most = resource.getrlimit(kind)[1]
    return -1 if most == resource.RLIM_INFINITY else most


def _memory(root: str) -> Usage:
    """The memory that the processes of the control group use, and may use."""
    group = f"{root}/sys/fs/cgroup"
    used, most = _number(f"{group}/memory.current"), _number(f"{group}/memory.max")
    reclaimable = 0
    for line in read_text(f"{group}/memory.stat").splitlines():
        name, _, number = line.partition(" ")
        reclaimable += int(number) if name in ("inactive_file", "active_file") else 0
    return Usage(used=max(0, used - reclaimable), most=most)


def _ports(root: str) -> Usage:
    """The ports that the kernel assigns to outgoing connections."""
    words = read_text(f"{root}/proc/sys/net/ipv4/ip_local_port_range").split()
    most = int(words[1]) - int(words[0]) + 1 if len(words) == 2 else 0
    return Usage(used=_sockstat(root, "tw") + _sockstat(root, "inuse"), most=most)


def _tcp_pages(root: str) -> Usage:
    words = read_text(f"{root}/proc/sys/net/ipv4/tcp_mem").split()
    return Usage(used=_sockstat(root, "mem"), most=int(words[2]) if len(words) == 3 else 0)


def _sockstat(root: str, name: str) -> int:
    """A number from a line such as "TCP: inuse 5 orphan 0 tw 0 alloc 7 mem 1"."""
    for line in read_text(f"{root}/proc/net/sockstat").splitlines():
        kind, *words = line.split()
        if kind == "TCP:" and name in words:
            return int(words[words.index(name) + 1])
    return 0


def _number(path: str) -> int:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else 0


def look_at_versions(root: str = "") -> dict[str, str]:
    """Versions by software, without importing it; what is not installed is left out."""
    found = {"Python": platform.python_version()}
    found |= {title: _version(name) for title, name in _PACKAGES.items()}
    if found["PyTorch"]:  # only then are these needed, and finding them takes a directory walk
        for title, name in _NVIDIA.items():
            versions = (_version(name + suffix) for suffix in ("-cu13", "-cu12", "-cu11", ""))
            found[title] = next(filter(None, versions), "")
    found[DRIVER] = read_text(f"{root}/sys/module/nvidia/version").strip()
    return {title: version for title, version in found.items() if version}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def look_at_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that are set, by the names that must be unset to be rid of them."""
    found = {name: environ[name] for name in _SETTINGS if environ.get(name)}
    for name in (*PROXIES, *map(str.upper, PROXIES)):
        if text := environ.get(name):
            found[name] = _without_password(text)
    return found


def proxy_bypasses(environ: Mapping[str, str], hosts: Sequence[str]) -> tuple[str, ...]:
    """The hosts that no_proxy names, themselves or by their domain."""
    text = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    names = [word.strip().lower().lstrip(".") for word in text.split(",") if word.strip()]

    def is_named(host: str) -> bool:
        return any(
            name in ("*", host.lower()) or host.lower().endswith(f".{name}") for name in names
        )

    return tuple(host for host in hosts if is_named(host))


def _without_password(text: str) -> str:
    """The proxy without "me:secret@", whether or not "http://" is before that."""
    before, at, rest = text.rpartition("@")
    scheme, separator, _ = before.partition("://")
    return f"{scheme + separator if separator else ''}***@{rest}" if at else text
