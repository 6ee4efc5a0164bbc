"""What one machine has: devices, limits, disk space, versions of software, and settings.

Most of it is read from the kernel's files, whose root is an argument where tests need it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import tempfile
from collections.abc import Mapping, Sequence

from rallypoint.cluster.devices import count_gpus, gpu_models, list_names, read_text
from rallypoint.doctor.cluster_facts import DeviceFacts, Disk, ProcessLimits, Usage

SHM = "/dev/shm"
DRIVER = "NVIDIA driver"
_PACKAGES = {"Rallypoint": "rallypoint", "NumPy": "numpy", "PyTorch": "torch"}
# Prefixes of distribution names: what follows is CUDA's version.
_NVIDIA = {"NCCL": "nvidia-nccl", "CUDA": "nvidia-cuda-runtime"}
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
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


def disk_places(environ: Mapping[str, str], log_dir: str = "") -> list[tuple[str, str]]:
    """What a job writes to, and its path; empty for Python's default for temporary files, as to
    find it may hang.
    """
    temporary = ("the directory for temporary files", environ.get("TMPDIR", ""))
    return [(SHM, SHM), temporary, *([("--log-dir", log_dir)] if log_dir else [])]


def look_at_disk(what: str, path: str) -> Disk | None:
    """The file system of that place; None if it cannot be examined. It may hang."""
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
    """The proxy without its user and password; both "http://me:secret@proxy" and "me:secret@proxy"
    are usual.
    """
    before, at, rest = text.rpartition("@")
    scheme, separator, _ = before.partition("://")
    return f"{scheme + separator if separator else ''}***@{rest}" if at else text
