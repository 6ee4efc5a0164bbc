"""Which backends can be used here, under torch.distributed's names."""

from __future__ import annotations

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.delegated.plug_ins import ENGINES, parse_backend, why_absent

_DEFAULTS = {"cpu": ENGINES[0], "cuda": "nccl", "npu": "hccl"}


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
