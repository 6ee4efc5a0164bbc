"""What can be used here, under torch.distributed's names."""

from __future__ import annotations

from rallypoint.process_group.delegated.registry import why_absent


def is_available() -> bool:
    """Whether this package can communicate: always."""
    return True


def is_nccl_available() -> bool:
    """Whether the backend "nccl" can be used here: a PyTorch with NCCL, and a GPU."""
    return not why_absent("nccl")


def is_gloo_available() -> bool:
    """Whether the backend "gloo" can be used here: a PyTorch with gloo."""
    return not why_absent("gloo")


def is_mpi_available() -> bool:
    """Whether the backend "mpi" can be used here: mpi4py, and an MPI that it finds."""
    return not why_absent("mpi")


def is_hccl_available() -> bool:
    """Whether the backend "hccl" can be used here: torch_npu, and an Ascend NPU."""
    return not why_absent("hccl")
