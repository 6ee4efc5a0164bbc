"""What a backend of PyTorch's lacks on this machine, and how to get it."""

from __future__ import annotations

from importlib.util import find_spec

_HOW_TO_GET_TORCH = "PyTorch is not installed; get it with: pip install torch"
_PACKAGE_OF_HCCL = "torch_npu"


def why_absent(name: str) -> str:
    """What is missing for a backend, and how to get it; empty: nothing."""
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
    return "" if has_gpu else "PyTorch sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def _why_no_hccl() -> str:
    if find_spec(_PACKAGE_OF_HCCL) is None:
        return (
            f"{_PACKAGE_OF_HCCL} is not installed; get it with: pip install torch-npu, on a "
            "machine with Ascend NPUs and CANN"
        )
    try:
        __import__(_PACKAGE_OF_HCCL)
    except Exception as error:  # it looks for its libraries as it is imported
        return f"{_PACKAGE_OF_HCCL} cannot be imported ({error}); source CANN's set_env.sh first"
    import torch.distributed as dist

    return "" if "HCCL" in dist.Backend._plugins else f"{_PACKAGE_OF_HCCL} brings no backend hccl"
