"""Accelerators are counted from the kernel's files, as their vendors' variables restrict them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.cluster.devices import count_gpus, count_xpus, gpu_models, gpu_numa_nodes


@pytest.fixture
def nvidia(tmp_path: Path) -> str:
    for number, address in enumerate(["0000:0a:00.0", "0000:17:00.0", "0001:02:00.0"]):
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{number}\n" if number else "-1\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("0,2", 2),
        ("", 0),
        ("-1", 0),
        ("1,9,2", 1),  # CUDA stops at the first that is not there
        ("GPU-8f6a,MIG-77", 2),
    ],
)
def test_nvidia(nvidia: str, visible: str | None, count: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, nvidia) == count


def test_numa_nodes_follow_the_visible_order(nvidia: str) -> None:
    assert gpu_numa_nodes({}, nvidia) == [-1, 1, 2]
    assert gpu_numa_nodes({"CUDA_VISIBLE_DEVICES": "2,1"}, nvidia) == [2, 1]
    assert gpu_numa_nodes({"CUDA_VISIBLE_DEVICES": "GPU-8f6a"}, nvidia) == [-1]


def test_nvidia_in_a_container_without_the_drivers_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus({}, str(tmp_path)) == 2


def test_nvidia_in_a_container_that_was_given_some(nvidia: str) -> None:
    gpus = Path(nvidia, "proc/driver/nvidia/gpus")
    for minor, directory in enumerate(sorted(gpus.iterdir())):
        text = f"Model: \t\t NVIDIA H200\nDevice Minor: \t {minor}\n"
        (directory / "information").write_text(text)
    Path(nvidia, "dev").mkdir()
    for name in ("nvidia1", "nvidia2", "nvidiactl"):
        Path(nvidia, "dev", name).touch()
    assert count_gpus({}, nvidia) == 2
    assert gpu_numa_nodes({}, nvidia) == [1, 2]
    assert gpu_models(nvidia) == ("NVIDIA H200",)


def test_amd(tmp_path: Path) -> None:
    for node, simds in enumerate([0, 304, 304]):  # the first is the CPU
        directory = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(node)
        directory.mkdir(parents=True)
        (directory / "properties").write_text(f"cpu_cores_count 8\nsimd_count {simds}\n")
    assert count_gpus({}, str(tmp_path)) == 2
    assert count_gpus({"HIP_VISIBLE_DEVICES": "1"}, str(tmp_path)) == 1


def test_intel(tmp_path: Path) -> None:
    for name, vendor in (("renderD128", "0x8086"), ("renderD129", "0x10de"), ("card0", "0x8086")):
        directory = tmp_path / "sys/class/drm" / name / "device"
        directory.mkdir(parents=True)
        (directory / "vendor").write_text(f"{vendor}\n")
    assert count_xpus({}, str(tmp_path)) == 1
    assert count_xpus({"ZE_AFFINITY_MASK": ""}, str(tmp_path)) == 0


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert (count_gpus({}, str(tmp_path)), count_xpus({}, str(tmp_path))) == (0, 0)
    assert gpu_numa_nodes({}, str(tmp_path)) == []
