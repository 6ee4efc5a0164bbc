"""Checks 12, 14 and 15: resources that a node may run out of, and other programs on it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Set

from rallypoint.doctor.check_result import Finding, Pair, Severity, by_value, listed
from rallypoint.doctor.cluster_facts import ClusterFacts, Disk, NodeFacts
from rallypoint.doctor.machine import SHM

_FEW_FILES = 1024
_FILES_PER_NODE = 32  # connections of a rank, and some other files
_PIDS_PER_WORKER = 32  # a worker, and its threads
_LITTLE_SHM = 64 << 20  # what containers get by default
_FULL_BYTES, _NEARLY_FULL_BYTES = 64 << 20, 1 << 30
_FULL_SHM_SHARE = 0.01
_FULL, _NEARLY_FULL = 0.98, 0.9
_SMALL_BACKLOG = 128


def limits(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 12: the limits of processes and of the control group."""
    for node in cluster.nodes:
        found = node.limits
        wanted = max(_FEW_FILES, _FILES_PER_NODE * cluster.count)
        if 0 <= found.open_files < wanted:
            yield _finding(
                node,
                Severity.RED if found.open_files < wanted // 4 else Severity.YELLOW,
                12,
                f"a process may open {found.open_files} files there, but {wanted} may be needed",
                "raise the hard limit (ulimit -Hn, LimitNOFILE of the service)",
            )
        if node.devices.has_infiniband and 0 <= found.memlock_bytes < 1 << 30:
            yield _finding(
                node,
                Severity.YELLOW,
                12,
                f"a process may lock {found.memlock_bytes >> 10} KiB of memory, but InfiniBand "
                "must lock all that it sends",
                "set memlock to unlimited (/etc/security/limits.conf, LimitMEMLOCK)",
            )
        workers = int(node.workers) if node.workers.isdecimal() else 1
        wanted = _PIDS_PER_WORKER * workers
        if 0 <= found.free_pids < wanted:
            yield _finding(
                node,
                Severity.RED if found.free_pids < workers else Severity.YELLOW,
                12,
                f"only {found.free_pids} more processes and threads may start there, but {wanted}"
                " may be needed",
                "raise the limit (ulimit -u, TasksMax of the service, pids limit of the container)",
            )
        if found.memory.share > _NEARLY_FULL:
            yield _finding(
                node,
                Severity.RED if found.memory.share > _FULL else Severity.YELLOW,
                12,
                f"{found.memory.share:.0%} of the {found.memory.most >> 20} MiB of memory that this"
                " control group may use are in use",
                "ask for more memory, or end what uses it",
            )


def disks(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 12: disk space, once for each file system."""
    for node in cluster.nodes:
        told: set[str] = set()
        for disk in node.disks:
            if disk.device in told:
                continue
            for finding in _disk(node, disk):
                told.add(disk.device)
                yield finding


def _disk(node: NodeFacts, disk: Disk) -> Iterator[Finding]:
    where = f"{disk.path}, {disk.what}," if disk.path != disk.what else disk.path
    if disk.path == SHM:
        full = int(min(_FULL_BYTES, _FULL_SHM_SHARE * disk.total_bytes))
        nearly = full
    else:
        full, nearly = _FULL_BYTES, _NEARLY_FULL_BYTES
    if disk.free_bytes < full or not disk.has_inodes:
        what = f"is full: {disk.free_bytes >> 20} MiB free of {disk.total_bytes >> 20} MiB"
        if not disk.has_inodes:
            what = "has no inodes left for more files"
        is_shm = disk.path == SHM
        yield _finding(
            node,
            Severity.RED,
            12,
            f"{where} {what}",
            f"delete leftover files there (ls -l {SHM})"
            if is_shm
            else "delete files that are not needed, or name another place (TMPDIR, --log-dir)",
        )
    elif disk.free_bytes < nearly:
        yield _finding(
            node,
            Severity.YELLOW,
            12,
            f"{where} is nearly full: {disk.free_bytes >> 20} MiB of {disk.total_bytes >> 20} MiB"
            " are free",
            "delete files that are not needed, or name another place (TMPDIR, --log-dir)",
        )
    elif disk.path == SHM and disk.total_bytes <= _LITTLE_SHM:
        yield _finding(
            node,
            Severity.YELLOW,
            12,
            f"{SHM} has only {disk.total_bytes >> 20} MiB",
            "give the container more (--shm-size, or a volume of medium Memory), if the job uses"
            " NCCL or workers of a DataLoader; Rallypoint does without",
        )


def network(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 14: kernel tables that are full, and queues that are too short."""
    for node in cluster.nodes:
        found = node.limits
        for usage, what, advice in (
            (
                found.conntrack,
                "the firewall's table of connections",
                "raise net.netfilter.nf_conntrack_max",
            ),
            (
                found.ports,
                "the ports for outgoing connections",
                "widen net.ipv4.ip_local_port_range, or wait until old connections are gone",
            ),
            (found.tcp_pages, "the memory for TCP", "raise net.ipv4.tcp_mem"),
        ):
            if usage.share > _NEARLY_FULL:
                is_full = usage.share > _FULL
                yield _finding(
                    node,
                    Severity.RED if is_full else Severity.YELLOW,
                    14,
                    f"{what} {'are' if what.startswith('the ports') else 'is'}"
                    f" {'full' if is_full else 'nearly full'} ({usage.used} of {usage.most})",
                    advice,
                )
        if found.somaxconn < _SMALL_BACKLOG:
            yield _finding(
                node,
                Severity.YELLOW,
                14,
                f"only {found.somaxconn} connections may wait to be accepted",
                "raise net.core.somaxconn to 4096",
            )


def congestion_control(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 14: whether TCP behaves alike on all nodes."""
    known = [
        (node.name, node.limits.congestion_control)
        for node in cluster.nodes
        if node.limits.congestion_control
    ]
    if len({name for _, name in known}) > 1:
        yield Finding(
            level=Severity.YELLOW,
            check=14,
            what=f"TCP's congestion control differs: {by_value(known)}",
            advice="set net.ipv4.tcp_congestion_control to the same on all nodes",
        )


def other_jobs(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 15: other running jobs of this user."""
    for node in cluster.nodes:
        if node.jobs:
            yield _finding(
                node,
                Severity.YELLOW,
                15,
                f"other jobs of yours run there: {listed(node.jobs)}",
                "end them if they are left over (rallypoint stop), or give the jobs different CPUs"
                " and GPUs",
            )


def _finding(node: NodeFacts, level: Severity, check: int, what: str, advice: str) -> Finding:
    return Finding(level=level, check=check, where=(node.name,), what=what, advice=advice)
