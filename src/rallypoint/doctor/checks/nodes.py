"""Checks 7 to 16, of nodes compared with each other, and of each by itself. Pure.

What must agree on all nodes: versions, devices, clocks and paths. What a node runs out of, where
the job was started on it, its token, and harmful variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set

from rallypoint.base.address import is_loopback
from rallypoint.doctor.check_result import Finding, Pair, Severity, by_value, listed
from rallypoint.doctor.cluster_facts import (
    DRIVER,
    PROXIES,
    SHM,
    ClusterFacts,
    Disk,
    NodeFacts,
    PathState,
)

_NONE = "none"
_CLOCK_YELLOW_S, _CLOCK_RED_S = 1.0, 5.0
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_END = "-1"  # what follows it is hidden; alone, it hides all GPUs on purpose
_FEW_FILES = 1024
_FILES_PER_NODE = 32  # connections of a rank, and some other files
_PIDS_PER_WORKER = 32  # a worker, and its threads
_LITTLE_SHM = 64 << 20  # what containers get by default
_FULL_BYTES, _NEARLY_FULL_BYTES = 64 << 20, 1 << 30
_FULL_SHM_SHARE = 0.01
_FULL, _NEARLY_FULL = 0.98, 0.9
_SMALL_BACKLOG = 128


# What must agree on all nodes.


def versions(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 7: one finding for all nodes that differ from the majority in the same way."""
    titles = sorted({title for node in cluster.nodes for title in node.versions})
    usual = {title: _most_usual(cluster.nodes, title) for title in titles}
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for node in cluster.nodes:
        other = tuple(
            (title, node.versions.get(title, _NONE))
            for title in titles
            if node.versions.get(title, _NONE) != usual[title]
        )
        if other:
            groups.setdefault(other, []).append(node.name)
    for other, where in groups.items():
        told = ", ".join(
            f"{title} {text} (the others {usual[title]})"
            if text != _NONE
            else f"no {title} (the others {usual[title]})"
            for title, text in other
        )
        what = f"it has {told}" if len(where) == 1 else f"they have {told}"
        level = Severity.RED
        advice = "install the same versions on all nodes, or use one shared environment"
        if all(title == DRIVER for title, _ in other):
            level, advice = Severity.YELLOW, "install the same driver on all nodes"
        yield Finding(level, 7, tuple(where), what, advice)
    yield from _script(cluster)


def _most_usual(nodes: tuple[NodeFacts, ...], title: str) -> str:
    """The most common version; of two that are equally common, the first node's."""
    return Counter(node.versions.get(title, _NONE) for node in nodes).most_common(1)[0][0]


def _script(cluster: ClusterFacts) -> Iterator[Finding]:
    digests: dict[str, list[str]] = {}
    path = ""
    for node in cluster.nodes:
        for look in node.paths:
            if look.is_script and look.digest:
                digests.setdefault(look.digest, []).append(node.name)
                path = look.path
    if len(digests) > 1:
        few = min(digests.values(), key=len)
        what = f"the script {path} differs from the one on the other nodes"
        advice = "copy the same file to all nodes, or keep it in a directory that all share"
        yield Finding(Severity.RED, 7, tuple(few), what, advice)


def devices(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 8: whether each node has the GPUs and CPUs for its workers."""
    counts = {node.name: node.devices.visible for node in cluster.nodes}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count} on {name}" for name, count in counts.items())
        what = f"the nodes have different numbers of GPUs: {told}"
        advice = "check the driver on all nodes (nvidia-smi), or give each its --nproc-per-node"
        yield Finding(Severity.YELLOW, 8, (), what, advice)
    models = [(node.name, ", ".join(node.devices.models)) for node in cluster.nodes]
    known = [(name, text) for name, text in models if text]
    if len({text for _, text in known}) > 1:
        what = f"the nodes have different GPUs: {by_value(known)}"
        advice = "use nodes of one kind: a job is as fast as its slowest GPU"
        yield Finding(Severity.YELLOW, 8, (), what, advice)
    for node in cluster.nodes:
        yield from _visible_devices(node)
        workers = int(node.workers) if node.workers.isdecimal() else 0
        if 0 < node.devices.visible < workers:
            what = f"--nproc-per-node is {workers}, and there are {node.devices.visible} GPUs"
            advice = "start one worker for each GPU, as --nproc-per-node gpu does"
            yield Finding(Severity.YELLOW, 8, (node.name,), what, advice)
        threads = node.settings.get("OMP_NUM_THREADS", "1")
        wanted = workers * (int(threads) if threads.isdecimal() else 1)
        if wanted > node.devices.cpus and workers > 1:
            what = (
                f"{workers} workers with OMP_NUM_THREADS={threads} need {wanted} CPUs, but"
                f" {node.devices.cpus:g} may be used there"
            )
            advice = (
                "start fewer workers, or ask for more CPUs (--cpus-per-task under Slurm, resources"
                " in a pod)"
            )
            yield Finding(Severity.YELLOW, 8, (node.name,), what, advice)


def _visible_devices(node: NodeFacts) -> Iterator[Finding]:
    text = node.settings.get(_VARIABLE)
    if text is None or not node.devices.gpus:
        return
    names = [word.strip() for word in text.split(",") if word.strip()]
    if _END in names:
        names = names[: names.index(_END)]
    if len(set(names)) < len(names):
        what = f"{_VARIABLE}={text} names a GPU twice"
    elif node.devices.visible < len(names):
        what = f"{_VARIABLE}={text} names more GPUs than the {node.devices.gpus} of this node"
    else:
        return
    advice = f"name each GPU once, from 0 to {node.devices.gpus - 1}, or unset it"
    yield Finding(Severity.RED, 8, (node.name,), what, advice)


def clocks(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 11: each clock against the median of all."""
    offsets = sorted(cluster.clocks_s.items(), key=lambda each: each[1])
    if len(offsets) < 2:
        return
    middle = offsets[(len(offsets) - 1) // 2][1]
    for number, offset in offsets:
        ahead_s = offset - middle
        if abs(ahead_s) > _CLOCK_YELLOW_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            others = "that of the other node" if len(offsets) == 2 else "the others"
            level = Severity.RED if abs(ahead_s) > _CLOCK_RED_S else Severity.YELLOW
            what = f"its clock is {abs(ahead_s):.1f} s {way} {others}"
            advice = "let a time service set it: timedatectl set-ntp true, or chronyc makestep"
            yield Finding(level, 11, (cluster.name(number),), what, advice)


_STATES: Mapping[PathState, tuple[str, str]] = {
    PathState.MISSING: ("does not exist", "create it, or mount its file system"),
    PathState.UNREADABLE: ("cannot be read", "give this user access to it"),
    PathState.READ_ONLY: (
        "cannot be written",
        "give this user write access, or mount it read-write, if the job is to write there",
    ),
    PathState.HANGS: (
        "does not answer within 2 s",
        "its file system hangs: check its server (mount, dmesg), and remount it",
    ),
}


def paths(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 13: whether paths can be used; the same problem on several nodes is one finding."""
    for node in cluster.nodes:
        for look in node.paths:
            if look.state is PathState.GOOD:
                continue
            what, advice = _STATES[look.state]
            detail = f" ({look.detail})" if look.detail else ""
            what = f"{'the script ' if look.is_script else ''}{look.path} {what}{detail}"
            yield Finding(Severity.RED, 13, (node.name,), what, advice)


# What concerns one node.


def _severity(*, is_red: bool) -> Severity:
    return Severity.RED if is_red else Severity.YELLOW


def surroundings(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 9: what the scheduler says."""
    for node in cluster.nodes:
        found = node.surroundings
        what, _semicolon, advice = (found.wrong or found.note).partition("; ")
        if what:
            level = _severity(is_red=bool(found.wrong))
            advice = advice.rstrip(".") or "`rallypoint where` shows the detected environment"
            yield Finding(level, 9, (node.name,), what.rstrip("."), advice)


def token(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 10: whether there is a token. That all nodes have the same is proved when they
    connect.
    """
    without = tuple(node.name for node in cluster.nodes if not node.has_token)
    if without and cluster.is_shared and not cluster.draws_token:
        what = "no token is set, so anyone who can connect to the port can join the job"
        advice = "set the same RALLYPOINT_TOKEN, or --token-file, on all nodes"
        yield Finding(Severity.YELLOW, 10, without, what, advice)


def limits(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 12: the limits of processes and of the control group."""
    for node in cluster.nodes:
        found, where = node.limits, (node.name,)
        wanted = max(_FEW_FILES, _FILES_PER_NODE * cluster.count)
        if 0 <= found.open_files < wanted:
            level = _severity(is_red=found.open_files < wanted // 4)
            what = f"a process may open {found.open_files} files there, but {wanted} may be needed"
            advice = "raise the hard limit (ulimit -Hn, LimitNOFILE of the service)"
            yield Finding(level, 12, where, what, advice)
        if node.devices.has_infiniband and 0 <= found.memlock_bytes < 1 << 30:
            what = (
                f"a process may lock {found.memlock_bytes >> 10} KiB of memory, but InfiniBand must"
                " lock all that it sends"
            )
            advice = "set memlock to unlimited (/etc/security/limits.conf, LimitMEMLOCK)"
            yield Finding(Severity.YELLOW, 12, where, what, advice)
        workers = int(node.workers) if node.workers.isdecimal() else 1
        wanted = _PIDS_PER_WORKER * workers
        if 0 <= found.free_pids < wanted:
            level = _severity(is_red=found.free_pids < workers)
            what = (
                f"only {found.free_pids} more processes and threads may start there, but {wanted}"
                " may be needed"
            )
            advice = (
                "raise the limit (ulimit -u, TasksMax of the service, pids limit of the container)"
            )
            yield Finding(level, 12, where, what, advice)
        if found.memory.share > _NEARLY_FULL:
            level = _severity(is_red=found.memory.share > _FULL)
            what = (
                f"{found.memory.share:.0%} of the {found.memory.most >> 20} MiB of memory that this"
                " control group may use are in use"
            )
            yield Finding(level, 12, where, what, "ask for more memory, or end what uses it")


def disks(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 12: disk space, once for each file system."""
    for node in cluster.nodes:
        told: set[str] = set()
        for disk in node.disks:
            if disk.device not in told and (found := _disk(disk)) is not None:
                told.add(disk.device)
                level, what, advice = found
                yield Finding(level, 12, (node.name,), what, advice)


def _disk(disk: Disk) -> tuple[Severity, str, str] | None:
    """What is wrong with it, and the advice; None if nothing is."""
    is_shm = disk.path == SHM
    where = f"{disk.path}, {disk.what}," if disk.path != disk.what else disk.path
    free, total = f"{disk.free_bytes >> 20} MiB", f"{disk.total_bytes >> 20} MiB"
    full, nearly = _FULL_BYTES, _NEARLY_FULL_BYTES
    if is_shm:
        full = nearly = int(min(_FULL_BYTES, _FULL_SHM_SHARE * disk.total_bytes))
    advice = "delete files that are not needed, or name another place (TMPDIR, --log-dir)"
    if disk.free_bytes < full or not disk.has_inodes:
        what = f"is full: {free} free of {total}"
        what = what if disk.has_inodes else "has no inodes left for more files"
        advice = f"delete leftover files there (ls -l {SHM})" if is_shm else advice
        return Severity.RED, f"{where} {what}", advice
    if disk.free_bytes < nearly:
        return Severity.YELLOW, f"{where} is nearly full: {free} of {total} are free", advice
    if is_shm and disk.total_bytes <= _LITTLE_SHM:
        advice = (
            "give the container more (--shm-size, or a volume of medium Memory), if the job uses"
            " NCCL or workers of a DataLoader; Rallypoint does without"
        )
        return Severity.YELLOW, f"{SHM} has only {total}", advice
    return None


def network(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 14: kernel tables that are full, and queues that are too short."""
    enlarge = "raise net.netfilter.nf_conntrack_max"
    widen = "widen net.ipv4.ip_local_port_range, or wait until old connections are gone"
    for node in cluster.nodes:
        found = node.limits
        for usage, what, advice in (
            (found.conntrack, "the firewall's table of connections is", enlarge),
            (found.ports, "the ports for outgoing connections are", widen),
            (found.tcp_pages, "the memory for TCP is", "raise net.ipv4.tcp_mem"),
        ):
            if usage.share > _NEARLY_FULL:
                is_full = usage.share > _FULL
                level = _severity(is_red=is_full)
                how = f"{'full' if is_full else 'nearly full'} ({usage.used} of {usage.most})"
                yield Finding(level, 14, (node.name,), f"{what} {how}", advice)
        if found.somaxconn < _SMALL_BACKLOG:
            what = f"only {found.somaxconn} connections may wait to be accepted"
            advice = "raise net.core.somaxconn to 4096"
            yield Finding(Severity.YELLOW, 14, (node.name,), what, advice)


def congestion_control(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 14: whether TCP behaves alike on all nodes."""
    found = [(node.name, node.limits.congestion_control) for node in cluster.nodes]
    known = [(name, told) for name, told in found if told]
    if len({told for _, told in known}) > 1:
        what = f"TCP's congestion control differs: {by_value(known)}"
        advice = "set net.ipv4.tcp_congestion_control to the same on all nodes"
        yield Finding(Severity.YELLOW, 14, (), what, advice)


def other_jobs(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 15: other running jobs of this user."""
    for node in cluster.nodes:
        if node.jobs:
            what = f"other jobs of yours run there: {listed(node.jobs)}"
            advice = (
                "end them if they are left over (rallypoint stop), or give the jobs different CPUs"
                " and GPUs"
            )
            yield Finding(Severity.YELLOW, 15, (node.name,), what, advice)


def bad_settings(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 16: variables that are known to do harm."""
    for node in cluster.nodes:
        if cluster.is_shared:
            yield from _proxy(cluster, node)
        for applies, what, advice in _bad(node):
            if applies:
                yield Finding(Severity.YELLOW, 16, (node.name,), what, advice)


def _proxy(cluster: ClusterFacts, node: NodeFacts) -> Iterator[Finding]:
    """Worded alike on all nodes, so all other nodes are named."""
    known = {lookup.host for lookup in node.names} - {*node.bypasses_proxy}
    hosts = [*cluster.hosts, *(host for host, _ in cluster.endpoints)]
    caught = [host for host in hosts if host in known and not is_loopback(host)]
    names = [each for each in node.settings if each.lower() in PROXIES]
    if names and caught:
        every = tuple(dict.fromkeys([*cluster.hosts, *caught]))
        what = (
            f"{names[0]}={node.settings[names[0]]} sends requests to the job's nodes through that"
            " proxy"
        )
        told = ",".join(every) if len(every) <= 8 else listed(every)
        advice = f"set no_proxy={told}, or unset {' '.join(names)}"
        yield Finding(Severity.RED, 16, (node.name,), what, advice)


def _bad(node: NodeFacts) -> list[tuple[bool, str, str]]:
    """For each check of a variable: whether it applies, the finding, and the advice."""
    settings, devices = node.settings, node.devices
    gloo = settings.get("GLOO_SOCKET_IFNAME", "")
    blocking = [name for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
                if settings.get(name) == "1"]  # fmt: skip
    return [
        (
            settings.get("NCCL_IB_DISABLE") == "1" and devices.has_infiniband,
            "NCCL_IB_DISABLE=1 keeps NCCL from using the node's InfiniBand",
            "unset it",
        ),
        (
            settings.get("NCCL_P2P_DISABLE") == "1" and devices.visible > 1,
            "NCCL_P2P_DISABLE=1 makes the GPUs of a node exchange data through main memory",
            "unset it, unless it works around a known fault of this machine",
        ),
        (
            bool(blocking),
            f"{' and '.join(blocking)}=1 makes each NCCL call block, which is slow",
            "unset it; timeouts are detected without it",
        ),
        (
            gloo.startswith("^") or "," in gloo,
            f"GLOO_SOCKET_IFNAME={gloo} is a pattern, which gloo does not understand",
            "name one interface, or set RALLYPOINT_SOCKET_IFNAME instead",
        ),
    ]
