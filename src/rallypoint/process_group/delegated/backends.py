"""The backends by name, and which can be used here, under torch.distributed's names.

They are the engine's own, those of known libraries, and those of other packages.

A package adds one with an entry point of the group ``rallypoint.backends``: its name is the
backend's, and its value a function that takes a `LibraryMember` and returns a `Delegate`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rallypoint.base.errors import InvalidArgumentError

if TYPE_CHECKING:
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
_DEFAULTS = {"cpu": ENGINES[0], "cuda": "nccl", "npu": "hccl"}


def parse_backend(backend: object) -> dict[str, str]:
    """The backend for each kind of device: ``"cpu:gloo,cuda:nccl"``, or a name for its own kind."""
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
    """The kind of device whose memory a backend takes."""
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
    """This process's end of the library, once all members have called this."""
    from pkgutil import resolve_name  # most programs never need it

    function: Callable[[LibraryMember], Delegate] = (
        resolve_name(_KNOWN[member.name][2])
        if member.name in _KNOWN
        else _added()[member.name].load()
    )
    return function(member)


def _added() -> Mapping[str, Any]:
    from importlib.metadata import entry_points  # most programs never need it

    return {each.name: each for each in entry_points(group=GROUP)}


class Backend(str):
    """A backend's name, in lower case: ``Backend("GLOO") == Backend.GLOO == "gloo"``.

    docs/guides/backends.md lists the backends and what each needs.
    """

    __slots__ = ()
    RALLYPOINT = "rallypoint"
    SHM = "shm"
    TCP = "tcp"
    GLOO = "gloo"
    NCCL = "nccl"
    HCCL = "hccl"
    MPI = "mpi"

    def __new__(cls, name: str) -> Backend:
        """The name in lower case."""
        return super().__new__(cls, str(name).lower())


def is_backend_available(backend: str) -> bool:
    """Whether groups of this backend, or of all in ``"cpu:gloo,cuda:nccl"``, can form here."""
    try:
        return not any(why_absent(name) for name in parse_backend(backend).values())
    except InvalidArgumentError:
        return False


def get_default_backend_for_device(device: object) -> str:
    """The default backend for tensors of a device: "cpu", "cuda:1", or a torch.device.

    Raises:
        InvalidArgumentError: there is none for it.
    """
    kind = str(device).partition(":")[0]
    if kind not in _DEFAULTS:
        raise InvalidArgumentError(
            f"no backend is known for {device!r}; known devices: {', '.join(_DEFAULTS)}"
        )
    return _DEFAULTS[kind]


def is_available() -> bool:
    """Whether this package can communicate: always True."""
    return True


def is_nccl_available() -> bool:
    """Whether the backend "nccl" can be used here: a PyTorch with NCCL, and a GPU."""
    return not why_absent("nccl")


def is_gloo_available() -> bool:
    """Whether the backend "gloo" can be used here: a PyTorch with gloo."""
    return not why_absent("gloo")


def is_ucc_available() -> bool:
    """Whether the backend "ucc" can be used here: always False, as no group can have it."""
    return False


def is_xccl_available() -> bool:
    """Whether the backend "xccl" can be used here: always False, as no group can have it."""
    return False


def is_mpi_available() -> bool:
    """Whether the backend "mpi" can be used here: mpi4py, and an MPI that it finds.

    A child process looks for it: MPI is not initialized by this.
    """
    return not why_absent("mpi")


def is_hccl_available() -> bool:
    """Whether the backend "hccl" can be used here: a torch_npu that can be imported.

    NPUs are not looked for: with none, `init_process_group` fails.
    """
    return not why_absent("hccl")
