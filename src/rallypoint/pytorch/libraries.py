"""What PyTorch's backends lack on this machine, and what they combine; does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

_HOW_TO_GET_TORCH = "PyTorch is not installed; get it with: pip install torch"
_PACKAGE_OF_HCCL = "torch_npu"
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = ("int8", "uint8", "int32", "int64")
_ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
_SUMS = ("SUM", "AVG")
_BITWISE = ("BAND", "BOR", "BXOR")


def _table(
    floats: Sequence[str], of_floats: Sequence[str], of_integers: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(floats, tuple(of_floats)) | dict.fromkeys(_INTEGERS, tuple(of_integers))


# The operators that each library has, by dtype; it combines complex numbers by their parts. Other
# collectives only move bytes. A sum of bools is "or", as in NumPy, and a product "and".
OPERATORS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "gloo": {
        **_table(_FLOATS, (*_ARITHMETIC, "AVG"), (*_ARITHMETIC, *_BITWISE)),
        "bool": (*_ARITHMETIC, *_BITWISE),
        "complex64": _SUMS,
        "complex128": _SUMS,
    },
    "nccl": {
        **_table(_FLOATS, (*_ARITHMETIC, "AVG", "PREMUL_SUM"), (*_ARITHMETIC, "AVG")),
        "bool": _ARITHMETIC,
        "complex64": _SUMS,
        "complex128": _SUMS,
    },
    "hccl": _table(("float16", "bfloat16", "float32"), _ARITHMETIC, _ARITHMETIC),
}


def why_absent(name: str) -> str:
    """What is missing for a backend, and how to get it; empty if nothing is."""
    if find_spec("torch") is None:
        return _HOW_TO_GET_TORCH
    import torch
    import torch.distributed as dist

    build = f"PyTorch {torch.__version__} is built without"
    if not dist.is_available():
        return f"{build} torch.distributed; install another build"
    if name == "gloo":
        return "" if dist.is_gloo_available() else f"{build} gloo; install another build"
    if name == "hccl":
        return _why_no_hccl()
    if not dist.is_nccl_available():
        return f"{build} NCCL; install a build for CUDA (pytorch.org/get-started)"
    has_gpu = torch.cuda.is_available()
    return "" if has_gpu else "PyTorch sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"


def _why_no_hccl() -> str:
    if find_spec(_PACKAGE_OF_HCCL) is None:
        return (
            f"{_PACKAGE_OF_HCCL} is not installed; get it with: pip install torch-npu, on a "
            "machine with Ascend NPUs and CANN"
        )
    try:
        __import__(_PACKAGE_OF_HCCL)
    except Exception as error:  # importing it looks for its libraries
        return f"{_PACKAGE_OF_HCCL} cannot be imported ({error}); source CANN's set_env.sh first"
    import torch.distributed as dist

    return "" if "HCCL" in dist.Backend._plugins else f"{_PACKAGE_OF_HCCL} provides no backend hccl"
