"""The checks on made-up facts: one cause is one finding, and its advice names what cures it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.doctor.check_result import Finding, Severity
from rallypoint.doctor.checks import TITLES, diagnose
from rallypoint.doctor.checks.pairs import Shape, grouped
from rallypoint.doctor.cluster_facts import (
    Absence,
    AddressFact,
    ClusterFacts,
    ConnectOutcome,
    DeviceFacts,
    Disk,
    EndpointProbe,
    InterfaceFact,
    Lookup,
    NodeFacts,
    PathLook,
    PathState,
    Port,
    Probe,
    ProcessLimits,
    Surroundings,
    Usage,
)

GIB = 1 << 30


def node(number: int, **changes: Any) -> NodeFacts:
    """A healthy one: n0 at 10.0.0.1, n1 at 10.0.0.2, ..."""
    address = f"10.0.0.{number + 1}"
    healthy = NodeFacts(
        number=number,
        name=f"n{number}",
        own_name=Lookup(host=f"n{number}", addresses=(address,)),
        addresses=(address,),
        interfaces=(InterfaceFact(name="eth0", addresses=(address,), mtu=1500, speed_mbps=10000),),
        choice=AddressFact(address=address, interface="eth0"),
        probe_port=4000,
        versions={"Python": "3.12.1", "NumPy": "2.0"},
        limits=ProcessLimits(open_files=1 << 20),
        has_token=True,
    )
    return replace(healthy, **changes)


def cluster(
    *nodes: NodeFacts, probes: Mapping[tuple[int, int], Any] | None = None, **changes: Any
) -> ClusterFacts:
    """Nodes that all reach each other, but for `probes`: changes, by pair."""
    pairs = itertools.permutations([each.number for each in nodes], 2)
    found = []
    for source, target in pairs:
        good = Probe(
            source=source,
            target=target,
            outcome=ConnectOutcome.REACHED,
            latency_us=100.0,
            mbit_s=9000.0,
        )
        found.append(replace(good, **(probes or {}).get((source, target), {})))
    healthy = ClusterFacts(
        count=len(nodes),
        nodes=nodes,
        probes=tuple(found),
        hosts={each.name: each.number for each in nodes},
        clocks_s={each.number: 0.0 for each in nodes},
    )
    return replace(healthy, **changes)


def three(**changes: Any) -> ClusterFacts:
    return cluster(node(0), node(1), node(2), **changes)


def alike(
    pairs: Iterable[tuple[int, int]], **changes: Any
) -> dict[tuple[int, int], dict[str, Any]]:
    """The same of all these pairs."""
    return dict.fromkeys(pairs, changes)


def one(found: ClusterFacts, level: Severity = Severity.RED) -> Finding:
    """There is one finding, of that level."""
    findings = diagnose(found)
    assert [each.level for each in findings] == [level], findings
    return findings[0]


def text(found: ClusterFacts, level: Severity = Severity.RED) -> str:
    return one(found, level).text(len(found.nodes))


def test_healthy_ones() -> None:
    assert diagnose(cluster(node(0))) == []
    assert diagnose(cluster(node(0), node(1))) == []
    assert diagnose(three()) == []


def test_each_check_has_a_title() -> None:
    assert list(TITLES) == list(range(1, 17))


DROPPED = {"outcome": ConnectOutcome.DROPPED, "detail": "no answer within 1.5 s"}


@pytest.mark.parametrize(
    ("pairs", "begin"),
    [
        ([(0, 1), (2, 1)], "n1: no other node can connect to it (no answer within "),
        ([(1, 0), (1, 2)], "n1: it cannot connect to any other node (no answer within "),
        (
            [(0, 1), (2, 1), (1, 0), (1, 2)],
            "n1: it cannot connect to any other node, nor they to it (",
        ),
        ([(0, 1)], "n0: cannot connect to n1, though n1 can connect the other way (no answer"),
    ],
)
def test_pairs_that_cannot_connect(pairs: list[tuple[int, int]], begin: str) -> None:
    assert text(three(probes=alike(pairs, **DROPPED))).startswith(begin)


def test_two_nodes_that_cannot_connect() -> None:
    found = cluster(node(0), node(1), probes=alike([(0, 1), (1, 0)], **DROPPED))
    assert text(found).startswith("all nodes: neither can connect to the other (no answer within ")


def test_the_advice_names_the_port_range() -> None:
    found = three(probes={(0, 1): DROPPED}, port_range="21000-21015")
    assert "allow TCP from n0 to ports 21000-21015 of n1" in text(found)


def test_the_advice_follows_the_way_in_which_it_failed() -> None:
    stranger = {"outcome": ConnectOutcome.STRANGER, "detail": "Connection reset by peer"}
    found = text(three(probes={(1, 0): stranger, (2, 0): stranger}))
    assert found.startswith("n0: no other node can connect to it (")
    assert found.endswith(
        ": Connection reset by peer); check whether another machine has the same address"
    )
    unreached = {"outcome": ConnectOutcome.UNREACHABLE, "detail": "No route to host"}
    assert text(three(probes={(1, 0): unreached, (2, 0): unreached})) == (
        "n0: no other node can connect to it (No route to host); check the routes between them (ip"
        " route), or choose a network that all share with RALLYPOINT_SOCKET_IFNAME"
    )


def test_a_port_range_that_is_taken() -> None:
    full = "all ports of the port range 21000-21001 are in use (21000 by process 7 (x))"
    assert text(three(nodes=(node(0, probe_error=full), node(1), node(2)))) == (
        f"n0: {full}; end the processes that hold them, or give a wider --port-range"
    )


def test_groups_cover_all_pairs_once() -> None:
    numbers = range(4)
    every = set(itertools.permutations(numbers, 2))
    for count in range(1, 5):
        for pairs in itertools.combinations(sorted(every), count):
            groups = grouped(pairs, numbers)
            covered = [pair for group in groups for pair in group.pairs]
            assert sorted(covered) == sorted(pairs)
    (group,) = grouped([(0, 3), (1, 3), (2, 3), (3, 1)], numbers, is_loose=True)
    assert (group.shape, group.node) == (Shape.AROUND, 3)


def test_a_name_on_the_loopback_is_one_cause_on_all_nodes() -> None:
    lookup = Lookup(host="n0", addresses=("127.0.1.1",))
    found = cluster(
        node(0, own_name=lookup),
        node(1, names=(lookup,)),
        node(2, names=(lookup,)),
        probes={(1, 0): DROPPED, (2, 0): DROPPED},
    )
    line = text(found)
    assert line.startswith("all nodes: the name n0 resolves to 127.0.1.1, a loopback address")
    assert "put '10.0.0.1 n0' in /etc/hosts" in line
    lone = cluster(node(0, own_name=lookup))
    assert diagnose(lone) == []  # as on any Debian that runs jobs of its own


def test_a_nodes_own_name_on_the_loopback_matters_only_if_others_use_it() -> None:
    vm = Lookup(host="vm", addresses=("127.0.0.1",))
    found = cluster(node(0, own_name=vm), node(1))
    line = text(found, Severity.YELLOW)
    assert line.startswith("n0: its own name vm resolves to 127.0.0.1, a loopback address; PyTorch")
    for used in (
        replace(found, hosts={**found.hosts, "vm": 0}),
        replace(found, endpoints=(("vm", 29400),)),
    ):
        assert "which other nodes cannot reach" in text(used)
    here = replace(found, hosts={"localhost": 0, "127.0.0.2": 1})
    assert [each for each in diagnose(here) if each.check == 1] == []


def test_a_name_that_leads_elsewhere() -> None:
    other = Lookup(host="n1", addresses=("10.9.9.9",))
    found = cluster(node(0, names=(other,)), node(1))
    assert "n0: the name n1 resolves to 10.9.9.9, but that node has 10.0.0.2" in text(
        found, Severity.YELLOW
    )


def test_an_endpoint_that_means_different_machines() -> None:
    """Of the examined nodes it is none, as with an etcd server."""

    def names(address: str, *others: str) -> tuple[Lookup, ...]:
        return (Lookup(host="keeper", addresses=(address, *others)),)

    first, second = node(0, names=names("10.9.9.1")), node(1, names=names("10.9.9.2"))
    found = cluster(first, second, endpoints=(("keeper", 2379),))
    assert text(found, Severity.YELLOW).startswith(
        "the endpoint's name keeper resolves to 10.9.9.1 on n0; 10.9.9.2 on n1; unless these are"
    )
    owner = node(2, addresses=("10.9.9.1", "10.9.9.2"))  # of two networks
    assert diagnose(cluster(first, second, owner, endpoints=(("keeper", 2379),))) == []
    turned = node(1, names=names("10.9.9.2", "10.9.9.1"))
    assert diagnose(cluster(first, turned, endpoints=(("keeper", 2379),))) == []


def test_an_unknown_name_explains_what_follows() -> None:
    lookup = Lookup(host="n1", error="Name or service not known")
    found = cluster(node(0, names=(lookup,)), node(1), probes={(0, 1): DROPPED})
    assert "add '10.0.0.2 n1' to /etc/hosts" in text(found)


def test_an_own_name_that_means_nothing() -> None:
    found = cluster(node(0, own_name=Lookup(host="n0", error="not known")), node(1))
    assert "its own name n0 cannot be resolved there" in text(found, Severity.YELLOW)


def test_endpoints() -> None:
    endpoint = ("n0", 29400)

    def probes(outcome: ConnectOutcome) -> tuple[EndpointProbe, ...]:
        return tuple(
            EndpointProbe(source=number, host="n0", port=29400, outcome=outcome)
            for number in range(3)
        )

    dropped = three(endpoints=(endpoint,), endpoint_probes=probes(ConnectOutcome.DROPPED))
    assert text(dropped).startswith("n1, n2: n0:29400, the rendezvous endpoint, does not answ")
    assert "allow TCP to port 29400 in the firewall of n0" in text(dropped)
    # A host that nobody reaches is told once.
    silent = replace(dropped, probes=three(probes={(1, 0): DROPPED, (2, 0): DROPPED}).probes)
    assert text(silent).startswith("n0: no other node can connect to it")
    held = replace(
        dropped,
        nodes=(node(0, ports=(Port(endpoint="n0:29400", held_by="process 7 (x)"),)), node(1)),
    )
    assert "n0: port 29400 of the endpoint (n0:29400) is held by process 7" in text(held)
    closed = (Port(endpoint="n0:80", error="Permission denied"),)
    assert text(three(nodes=(node(0, ports=closed), node(1), node(2)))) == (
        "n0: port 80 of the endpoint (n0:80) cannot be opened (Permission denied); "
        "choose a port from 1024 on with --rdzv-endpoint (or --master-port)"
    )
    other = three(endpoints=(endpoint,), endpoint_probes=probes(ConnectOutcome.STRANGER))
    assert "choose another port with --rdzv-endpoint (or --master-port), or end that" in text(other)
    lost = three(endpoints=(endpoint,), endpoint_probes=probes(ConnectOutcome.UNREACHABLE))
    assert "check the route to n0 (ip route get), or give a reachable address" in text(lost)
    local = three(endpoints=(("127.0.0.1", 29400),))
    assert "the endpoint's host is 127.0.0.1, which means a different machine on each node" in text(
        local
    )


def test_what_cannot_be_examined() -> None:
    absence = Absence(name="n3", why="cannot start anything there", advice="see that ssh works")
    found = three(absences=(absence,))
    assert text(found) == "n3: cannot start anything there; see that ssh works"


def test_interfaces() -> None:
    wrong = AddressFact(by="RALLYPOINT_SOCKET_IFNAME=ib0", error="ib0: no interface matches")
    assert "set RALLYPOINT_SOCKET_IFNAME=eth0 there" in text(
        cluster(node(0, choice=wrong), node(1))
    )
    docker = InterfaceFact(name="docker0", addresses=("172.17.0.1",))
    chosen = AddressFact(address="172.17.0.1", interface="docker0", by="GLOO_SOCKET_IFNAME=docker0")
    other = node(1, choice=chosen, interfaces=(*node(1).interfaces, docker))
    unreached = {"outcome": ConnectOutcome.UNREACHABLE, "other_address": "10.0.0.2"}
    found = cluster(node(0), other, node(2), probes={(0, 1): unreached, (2, 1): unreached})
    line = text(found)
    assert line.startswith("n1: it advertises the address 172.17.0.1 (docker0), as GLOO_SOCKET_IF")
    assert "which no other node reaches, while 10.0.0.2 (eth0) is reached" in line
    loopback = AddressFact(address="127.0.0.1", interface="lo", by="RALLYPOINT_SOCKET_IFNAME=lo")
    assert "the loopback address 127.0.0.1" in text(cluster(node(0, choice=loopback), node(1)))
    jumbo = replace(node(1).interfaces[0], mtu=9000)
    found = cluster(node(0), node(1, interfaces=(jumbo,)))
    assert "differ: MTU 1500 on n0; MTU 9000 on n1" in text(found, Severity.YELLOW)


def test_large_messages_and_slow_links() -> None:
    stalls = alike([(0, 2), (1, 2)], stalls=True)
    line = text(three(probes=stalls))
    assert line.startswith("n2: messages to it that are larger than a packet of the network get")
    assert "ip link set eth0 mtu 1400" in line
    slow = alike([(2, 0), (2, 1)], mbit_s=9.5)
    assert text(three(probes=slow)).startswith(
        "n2: data from it moves at 9.5 Mbit/s, while other links reach 9.0 Gbit/s"
    )
    pair = cluster(node(0), node(1), probes={(0, 1): {"mbit_s": 9.5}})
    assert "data between them moves at 9.5 Mbit/s" in text(pair, Severity.YELLOW)
    late = alike([(0, 1), (2, 1)], latency_us=50e3)
    assert "take 50 ms, while others take 0.1 ms" in text(three(probes=late), Severity.YELLOW)


def test_a_network_that_is_slow_everywhere_has_no_outlier() -> None:
    every = itertools.permutations(range(3), 2)
    assert diagnose(three(probes=alike(every, mbit_s=90.0))) == []


def test_versions() -> None:
    other = node(2, versions={"Python": "3.11.9", "NumPy": "2.0", "PyTorch": "2.13"})
    line = text(cluster(node(0), node(1), other))
    assert line.startswith(
        "n2: it has PyTorch 2.13 (the others none), Python 3.11.9 (the others 3.12.1); install"
    )
    driver = {**node(0).versions, "NVIDIA driver": "550.1"}
    newer = {**driver, "NVIDIA driver": "560.2"}
    found = cluster(node(0, versions=driver), node(1, versions=newer))
    assert "install the same driver" in text(found, Severity.YELLOW)
    look = PathLook(path="t.py", state=PathState.GOOD, is_script=True)
    found = cluster(
        *(node(number, paths=(replace(look, digest="aab"[number]),)) for number in range(3))
    )
    assert text(found).startswith("n2: the script t.py differs from the one on the other nodes")


def test_devices() -> None:
    gpus = DeviceFacts(gpus=4, visible=4, cpus=64)
    found = cluster(node(0, devices=gpus), node(1, devices=replace(gpus, gpus=3, visible=3)))
    assert "different numbers of GPUs: 4 on n0, 3 on n1" in text(found, Severity.YELLOW)
    twice = node(0, devices=gpus, settings={"CUDA_VISIBLE_DEVICES": "0,0"})
    assert "CUDA_VISIBLE_DEVICES=0,0 names a GPU twice" in text(cluster(twice))
    many = node(0, devices=replace(gpus, visible=2), settings={"CUDA_VISIBLE_DEVICES": "0,1,9"})
    assert "names more GPUs than the 4 of this node" in text(cluster(many))
    none = node(0, devices=replace(gpus, visible=0), settings={"CUDA_VISIBLE_DEVICES": "-1"})
    first = node(1, devices=replace(gpus, visible=1), settings={"CUDA_VISIBLE_DEVICES": "0,-1,7"})
    assert diagnose(cluster(none)) == diagnose(cluster(first)) == []
    models = [replace(gpus, models=(f"NVIDIA {name}",)) for name in ("H100", "A100")]
    found = cluster(node(0, devices=models[0]), node(1, devices=models[1]))
    assert "different GPUs: NVIDIA H100 on n0; NVIDIA A100 on n1" in text(found, Severity.YELLOW)
    few = node(0, devices=gpus, workers="8")
    assert "--nproc-per-node is 8, and there are 4 GPUs" in text(cluster(few), Severity.YELLOW)
    busy = node(0, devices=DeviceFacts(cpus=4), workers="4", settings={"OMP_NUM_THREADS": "2"})
    assert "need 8 CPUs, but 4 may be used" in text(cluster(busy), Severity.YELLOW)


def test_clocks() -> None:
    found = three(clocks_s={0: 100.0, 1: 100.1, 2: 110.0})
    assert text(found).startswith("n2: its clock is 9.9 s ahead of the others; let a time service")
    found = three(clocks_s={0: 0.0, 1: -2.0, 2: 0.1})
    assert "n1: its clock is 2.0 s behind the others" in text(found, Severity.YELLOW)
    assert diagnose(three(clocks_s={0: 50.0, 1: 50.2, 2: 50.4})) == []  # the examiner's is off


def test_paths() -> None:
    hung = PathLook(path="/data", state=PathState.HANGS)
    line = text(cluster(node(0), node(1, paths=(hung,))))
    assert line.startswith("n1: /data does not answer within 2 s; its file system hangs")
    missing = PathLook(path="/data", state=PathState.MISSING, detail="No such file or directory")
    found = cluster(node(0, paths=(missing,)), node(1, paths=(missing,)))
    assert text(found).startswith("all nodes: /data does not exist (No such file or directory)")


def test_disks_and_limits() -> None:
    disk = Disk(what="--log-dir", path="/logs", device="1", free_bytes=0, total_bytes=8 * GIB)
    same = replace(disk, what="the directory for temporary files", path="/tmp")
    line = text(cluster(node(0, disks=(same, disk))))  # one file system is told once
    assert line.startswith("/tmp, the directory for temporary files, is full: 0 MiB free of 8192")
    inodes = replace(disk, free_bytes=4 * GIB, has_inodes=False)
    line = text(cluster(node(0, disks=(inodes,))))
    assert line.startswith("/logs, --log-dir, has no inodes left for more files; delete files")
    nearly = replace(disk, free_bytes=GIB // 2)
    assert "nearly full: 512 MiB" in text(cluster(node(0, disks=(nearly,))), Severity.YELLOW)
    shm = Disk(
        what="/dev/shm", path="/dev/shm", device="2", free_bytes=64 << 20, total_bytes=64 << 20
    )
    assert "/dev/shm has only 64 MiB" in text(cluster(node(0, disks=(shm,))), Severity.YELLOW)
    files = node(0, limits=ProcessLimits(open_files=64))
    assert "may open 64 files there, but 1024 may be needed" in text(cluster(files))
    locked = node(
        0,
        limits=ProcessLimits(open_files=1 << 20, memlock_bytes=64 << 10),
        devices=DeviceFacts(has_infiniband=True),
    )
    assert "may lock 64 KiB" in text(cluster(locked), Severity.YELLOW)
    crowd = node(0, workers="8", devices=DeviceFacts(cpus=64))
    few = replace(crowd, limits=ProcessLimits(processes=4096, pids=Usage(used=40, most=100)))
    assert "only 60 more processes and threads may start there, but 256 may be needed" in text(
        cluster(few), Severity.YELLOW
    )
    assert "only 4 more" in text(cluster(replace(crowd, limits=ProcessLimits(processes=4))))
    memory = node(0, limits=ProcessLimits(memory=Usage(used=99, most=100)))
    assert "99% of the" in text(cluster(memory))


def test_the_kernels_network_and_other_jobs() -> None:
    table = node(0, limits=ProcessLimits(conntrack=Usage(used=65536, most=65536)))
    assert "table of connections is full (65536 of 65536); raise net.net" in text(cluster(table))
    ports = node(0, limits=ProcessLimits(ports=Usage(used=95, most=100)))
    assert "outgoing connections are nearly full" in text(cluster(ports), Severity.YELLOW)
    other = [node(i, limits=ProcessLimits(congestion_control=name)) for i, name in enumerate("ab")]
    assert "congestion control differs: a on n0; b on n1" in text(cluster(*other), Severity.YELLOW)
    queue = node(0, limits=ProcessLimits(somaxconn=64))
    assert "only 64 connections may wait" in text(cluster(queue), Severity.YELLOW)
    jobs = node(0, jobs=("run7 (process 42)",))
    assert "other jobs of yours run there: run7 (process 42)" in text(
        cluster(jobs), Severity.YELLOW
    )


def test_surroundings_token_and_settings() -> None:
    wrong = Surroundings(place="Slurm", wrong="tasks per node is 2; add --ntasks-per-node=1.")
    assert text(cluster(node(0, surroundings=wrong))) == (
        "tasks per node is 2; add --ntasks-per-node=1"
    )
    found = cluster(node(0), node(1, has_token=False))
    assert "n1: no token is set" in text(found, Severity.YELLOW)
    assert diagnose(replace(found, draws_token=True)) == []
    names = (Lookup(host="n1", addresses=("10.0.0.2",)),)
    proxied = node(0, names=names, settings={"http_proxy": "http://p:3128"})
    assert "set no_proxy=n0,n1, or unset http_proxy" in text(cluster(proxied, node(1)))
    several = replace(proxied, settings={"https_proxy": "p:1", "HTTP_PROXY": "p:2"})
    assert text(cluster(several, node(1))).endswith("or unset https_proxy HTTP_PROXY")
    bypassed = replace(proxied, bypasses_proxy=("n0", "n1"))
    assert diagnose(cluster(bypassed, node(1))) == []


@pytest.mark.parametrize(
    ("settings", "devices", "what"),
    [
        ({"NCCL_IB_DISABLE": "1"}, DeviceFacts(has_infiniband=True), "using the node's InfiniBand"),
        ({"NCCL_P2P_DISABLE": "1"}, DeviceFacts(gpus=2, visible=2), "through main memory"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, DeviceFacts(), "makes each NCCL call block"),
        ({"GLOO_SOCKET_IFNAME": "^lo"}, DeviceFacts(), "which gloo does not understand"),
    ],
)
def test_settings_that_do_harm(settings: dict[str, str], devices: DeviceFacts, what: str) -> None:
    found = cluster(node(0, settings=settings, devices=devices))
    assert what in text(found, Severity.YELLOW)
    if devices != DeviceFacts():
        assert diagnose(cluster(node(0, settings=settings))) == []
