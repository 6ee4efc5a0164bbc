"""--numa-binding on machines made of files: two sockets, four NUMA nodes, shared caches, GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.affinity import MODES, Binding, Topology, bind, parse_cpus, read_topology


def machine(*, gpus: tuple[int, ...] = ()) -> Topology:
    """16 CPUs: node n has CPUs 4n to 4n+3 in two cores of two threads; two nodes in a socket.

    Node 3 has two caches, one for each core; the others have one.
    """
    return Topology(
        nodes={node: frozenset(range(4 * node, 4 * node + 4)) for node in range(4)},
        sockets={cpu: cpu // 8 for cpu in range(16)},
        cores={cpu: cpu // 2 * 2 for cpu in range(16)},
        caches={cpu: cpu // 4 * 4 if cpu < 12 else cpu // 2 * 2 for cpu in range(16)},
        gpus=gpus,
    )


def cpus_of(binding: Binding) -> list[list[int]]:
    return [sorted(cpus) for cpus in binding.cpus]


def test_node_by_gpu() -> None:
    assert cpus_of(bind("node", machine(gpus=(2, 0)), 2)) == [[8, 9, 10, 11], [0, 1, 2, 3]]


def test_socket_by_gpu() -> None:
    assert cpus_of(bind("socket", machine(gpus=(3,)), 1)) == [list(range(8, 16))]


def test_exclusive_shares_whole_cores() -> None:
    found = bind("exclusive", machine(gpus=(1, 1, 2)), 3)
    assert cpus_of(found) == [[4, 5], [6, 7], [8, 9, 10, 11]]


def test_exclusive_needs_a_core_each() -> None:
    with pytest.raises(InvalidArgumentError, match="NUMA node 1 has 2 cores for 3 workers"):
        bind("exclusive", machine(gpus=(1, 1, 1)), 3)


def test_core_complex_takes_caches_in_turn() -> None:
    found = bind("core-complex", machine(gpus=(3, 3, 3)), 3)
    assert cpus_of(found) == [[12, 13], [14, 15], [12, 13]]


def test_without_gpus_workers_are_spread() -> None:
    found = bind("node", machine(), 4)
    assert cpus_of(found) == [[4 * node + i for i in range(4)] for node in range(4)]
    assert "no GPUs here" in found.note


def test_an_unknown_gpu_node_counts_as_spread() -> None:
    assert cpus_of(bind("node", machine(gpus=(-1, 2)), 2))[1] == [8, 9, 10, 11]


@given(st.sampled_from(MODES), st.integers(1, 8), st.lists(st.integers(-1, 3), max_size=8))
def test_every_worker_gets_some_cpus(mode: str, workers: int, gpus: list[int]) -> None:
    try:
        found = bind(mode, machine(gpus=tuple(gpus)), workers)
    except InvalidArgumentError:
        assert mode == "exclusive"
        return
    assert len(found.cpus) == workers
    assert all(cpus and cpus <= set(range(16)) for cpus in found.cpus)
    if mode == "exclusive":
        assert sum(map(len, found.cpus)) == len(frozenset().union(*found.cpus))


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("", set()), ("5", {5}), ("x", set())]
)
def test_the_kernels_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_reading_a_machine(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    first, rest = allowed[0], allowed[1:]
    write(tmp_path, "sys/devices/system/node/node0/cpulist", f"{first}\n")
    write(tmp_path, "sys/devices/system/node/node1/cpulist", ",".join(map(str, rest)) + "\n")
    write(tmp_path, "sys/devices/system/node/node2/cpulist", "4000-4001\n")  # not ours to use
    cpu = f"sys/devices/system/cpu/cpu{first}"
    write(tmp_path, f"{cpu}/topology/physical_package_id", "1\n")
    write(tmp_path, f"{cpu}/topology/thread_siblings_list", f"{first},900\n")
    for index, (level, kind) in enumerate([("1", "Instruction"), ("2", "Data"), ("3", "Unified")]):
        write(tmp_path, f"{cpu}/cache/index{index}/level", level)
        write(tmp_path, f"{cpu}/cache/index{index}/type", kind)
        write(tmp_path, f"{cpu}/cache/index{index}/shared_cpu_list", f"{first}\n")
    write(tmp_path, "proc/driver/nvidia/gpus/0000:17:00.0/information", "")
    write(tmp_path, "sys/bus/pci/devices/0000:17:00.0/numa_node", "1\n")
    found = read_topology({}, str(tmp_path))
    expected = {0: frozenset([first])} | ({1: frozenset(rest)} if rest else {})
    assert found.nodes == expected
    assert found.sockets[first] == 1
    assert found.cores[first] == first
    assert found.caches[first] == first
    assert found.gpus == [1]


def test_this_machine_can_be_read() -> None:
    found = read_topology({})
    assert frozenset().union(*found.nodes.values()) == frozenset(os.sched_getaffinity(0))
