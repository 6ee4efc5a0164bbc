"""The accelerators of this machine, from the kernel's files: no vendor library is loaded.

Restrictions by the environment (CUDA_VISIBLE_DEVICES and similar) are respected. `root` is for
tests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rallypoint.base.files import read_text

_INTEL = "0x8086"


def count_gpus(environ: Mapping[str, str], root: str = "") -> int:
    """The number of NVIDIA GPUs or, without any, of AMD GPUs."""
    nvidia = len(_nvidia_addresses(root))
    if nvidia:
        return len(_visible(nvidia, environ.get("CUDA_VISIBLE_DEVICES")))
    names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    visible = next((environ[name] for name in names if name in environ), None)
    return len(_visible(_count_amd(root), visible))


def count_xpus(environ: Mapping[str, str], root: str = "") -> int:
    """The number of Intel GPUs."""
    found = 0
    for name in list_names(f"{root}/sys/class/drm"):
        if name.startswith("renderD"):
            found += read_text(f"{root}/sys/class/drm/{name}/device/vendor").strip() == _INTEL
    return len(_visible(found, environ.get("ZE_AFFINITY_MASK")))


def gpu_numa_nodes(environ: Mapping[str, str], root: str = "") -> list[int]:
    """The NUMA node of each visible NVIDIA GPU, in the order of their indices; -1 if unknown."""
    addresses = _nvidia_addresses(root)
    nodes = []
    for index in _visible(len(addresses), environ.get("CUDA_VISIBLE_DEVICES")):
        path = f"{root}/sys/bus/pci/devices/{addresses[index]}/numa_node" if index >= 0 else ""
        text = read_text(path).strip() if path else ""
        nodes.append(int(text) if text.isdigit() else -1)
    return nodes


def gpu_models(root: str = "") -> tuple[str, ...]:
    """The models of the NVIDIA GPUs, each once, sorted."""
    gpus = f"{root}/proc/driver/nvidia/gpus"
    texts = [read_text(f"{gpus}/{name}/information") for name in list_names(gpus)]
    return tuple(sorted({model for text in texts if (model := _field(text, "Model"))}))


def _nvidia_addresses(root: str) -> Sequence[str]:
    """PCI addresses in bus order, which is the order of GPU indices on all usual hosts."""
    nodes = list_names(f"{root}/dev")
    devices = [name for name in nodes if name[:6] == "nvidia" and name[6:].isdigit()]
    gpus = f"{root}/proc/driver/nvidia/gpus"
    listed = sorted(list_names(gpus), key=str.lower)
    if not devices or not listed:
        # In some containers one of the two is missing.
        return devices or [name.lower() for name in listed]
    # A container may see all of the driver's files, but has the devices that it was given.
    minors = {name: _device_minor(read_text(f"{gpus}/{name}/information")) for name in listed}
    return [name.lower() for name in listed if minors[name] in ("", *devices)]


def _device_minor(information: str) -> str:
    """The N of a GPU's /dev/nvidiaN; empty if the driver does not say."""
    minor = _field(information, "Device Minor")
    return f"nvidia{minor}" if minor else ""


def _field(information: str, title: str) -> str:
    """A value of what the driver says about a GPU; empty if it does not say."""
    for line in information.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == title:
            return value.strip()
    return ""


def _count_amd(root: str) -> int:
    nodes = f"{root}/sys/class/kfd/kfd/topology/nodes"
    count = 0
    for name in list_names(nodes):
        for line in read_text(f"{nodes}/{name}/properties").splitlines():
            key, _, value = line.partition(" ")
            count += key == "simd_count" and value.strip() != "0"  # 0: a CPU
    return count


def _visible(count: int, text: str | None) -> list[int]:
    """The indices that this variable lists, up to the first invalid one; -1: named otherwise."""
    if text is None:
        return list(range(count))
    found: list[int] = []
    for item in text.split(","):
        name = item.strip()
        if name.isdigit() and int(name) < count:
            found.append(int(name))
        elif name.startswith(("GPU-", "MIG-")):
            found.append(-1)
        else:
            break
    return found


def list_names(path: str) -> list[str]:
    """The entries of a directory, sorted; empty if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
