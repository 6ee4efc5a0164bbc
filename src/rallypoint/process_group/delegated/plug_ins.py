"""The backends by name: the engine's own, those of known libraries, and those of other packages.

A package adds one with an entry point of the group ``rallypoint.backends``: its name is the
backend's, and its value a function that takes a `LibraryMember` and returns a `Delegate`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.delegated.delegate import Delegate, LibraryMember

ENGINES = ("rallypoint", "shm", "tcp")
GROUP = "rallypoint.backends"
# backend -> the kind of device whose memory it takes, the module that has `why_absent`, and the
# name of what makes a Delegate; as strings, because they are in packages above this one.
_NEEDS = "rallypoint.pytorch.libraries"
_TORCH = "rallypoint.pytorch.torch_library:TorchDelegate"
_MPI = "rallypoint.process_group.delegated.mpi_library"
_KNOWN = {
    "gloo": ("cpu", _NEEDS, _TORCH),
    "nccl": ("cuda", _NEEDS, _TORCH),
    "hccl": ("npu", _NEEDS, _TORCH),
    "mpi": ("cpu", _MPI, f"{_MPI}:connect"),
}


def parse_backend(backend: object) -> dict[str, str]:
    """The backend for each kind of device: ``"cpu:gloo,cuda:nccl"``, or a name for its own kind.

    Raises:
        InvalidArgumentError: there is no such backend, or not for that kind of device.
    """
    text = str(backend).lower()
    if ":" not in text:
        return {device_of(text): text}
    found: dict[str, str] = {}
    for part in text.split(","):
        device, _, name = part.strip().partition(":")
        if not device or not name or device in found:
            raise InvalidArgumentError(
                f"backend={backend!r} must be a name, or a list such as 'cpu:gloo,cuda:nccl' with "
                "each kind of device once"
            )
        if device_of(name) != device:
            raise InvalidArgumentError(
                f"backend={backend!r}: {name} takes memory of {device_of(name)}, not of {device}"
            )
        found[device] = name
    return found


def device_of(name: str) -> str:
    """The kind of device whose memory a backend takes.

    Raises:
        InvalidArgumentError: there is no such backend.
    """
    if name in ENGINES:
        return "cpu"
    if name in _KNOWN:
        return _KNOWN[name][0]
    others = _added()
    if name in others:
        return str(getattr(others[name].load(), "device", "cpu"))
    names = ", ".join([*ENGINES, *_KNOWN, *others])
    raise InvalidArgumentError(f"backend={name!r} is not available; use one of {names}")


def why_absent(name: str) -> str:
    """What a known backend lacks on this machine, and how to get it; empty if nothing."""
    if name not in _KNOWN:
        return ""
    return str(importlib.import_module(_KNOWN[name][1]).why_absent(name))


def connect(member: LibraryMember) -> Delegate:
    """This process's end of the library, once all members have called this.

    Raises:
        HostError: something is missing on this machine; the message says how to get it.
        Exception: any exception of the library.
    """
    if member.name in _KNOWN:
        module, _, name = _KNOWN[member.name][2].partition(":")
        function: Callable[[LibraryMember], Delegate] = getattr(
            importlib.import_module(module), name
        )
    else:
        function = _added()[member.name].load()
    return function(member)


def _added() -> Mapping[str, Any]:
    from importlib.metadata import entry_points  # most programs never need it

    return {each.name: each for each in entry_points(group=GROUP)}
