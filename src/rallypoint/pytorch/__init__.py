"""The PyTorch backend: `torch.distributed.init_process_group("rallypoint")`.

PyTorch finds it by itself (autoload.py). Nothing here imports torch before it is used.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.pytorch.autoload import register
    from rallypoint.pytorch.buckets import ddp_comm_hook

__all__ = ["ddp_comm_hook", "register"]

_MODULES = {"register": "autoload", "ddp_comm_hook": "buckets"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
