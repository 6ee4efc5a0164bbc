"""The versions of the software that must agree on all nodes, without importing any of it."""

from __future__ import annotations

import importlib.metadata
import platform

from rallypoint.cluster.devices import read_text

_PACKAGES = {"Rallypoint": "rallypoint", "NumPy": "numpy", "PyTorch": "torch"}
# Prefixes of distribution names: what follows is CUDA's version.
_NVIDIA = {"NCCL": "nvidia-nccl", "CUDA": "nvidia-cuda-runtime"}
DRIVER = "NVIDIA driver"


def look_at_versions(root: str = "") -> dict[str, str]:
    """Versions by software; what is not installed is left out."""
    found = {"Python": platform.python_version()}
    for title, name in _PACKAGES.items():
        try:
            found[title] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "PyTorch" in found:  # only then are these needed, and finding them takes a directory walk
        found |= _of_nvidia()
    if driver := read_text(f"{root}/sys/module/nvidia/version").strip():
        found[DRIVER] = driver
    return found


def _of_nvidia() -> dict[str, str]:
    found: dict[str, str] = {}
    for suffix in ("-cu13", "-cu12", "-cu11", ""):
        for title, name in _NVIDIA.items():
            try:
                found.setdefault(title, importlib.metadata.version(name + suffix))
            except importlib.metadata.PackageNotFoundError:
                continue
    return found
