"""Checks 7, 8, 11 and 13: versions, devices, clocks and paths must agree on all nodes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set

from rallypoint.doctor.check_result import Finding, Pair, Severity, by_value
from rallypoint.doctor.cluster_facts import ClusterFacts, NodeFacts, PathState
from rallypoint.doctor.machine import DRIVER

_NONE = "none"
_CLOCK_YELLOW_S, _CLOCK_RED_S = 1.0, 5.0
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_END = "-1"  # what follows it is hidden; alone, it hides all GPUs on purpose


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
