"""Rallypoint launches distributed training jobs, connects their processes, and explains why a job
fails or hangs.

The public face: torch.distributed's names, which __init__.pyi lists. They are loaded on first use;
__version__ is read from the installed package's metadata in the same way.

    import rallypoint as dist
    dist.init_process_group()
    dist.all_reduce(array)
"""

from __future__ import annotations

import sys

from rallypoint.base.public_names import names_on_first_use

_CONTAINER = (
    "docker build -t rallypoint -f examples/docker/Dockerfile . && docker run -it --rm rallypoint"
)


def _refusal() -> str:
    """Why this Python cannot run Rallypoint, as the build says it (CMakeLists.txt); "": it can."""
    if sys.platform != "linux":
        supported = f"Rallypoint runs on Linux, x86-64 and aarch64; this is {sys.platform}."
        return f"{supported} Use a container: {_CONTAINER}"
    if "t" in sys.abiflags:
        supported = f"Rallypoint does not support free-threaded Python; this is {sys.executable}."
        usual = "Use the usual build of Python, for example in a container:"
        return f"{supported} {usual} {_CONTAINER}"
    return ""


if _refused := _refusal():
    raise ImportError(_refused)

_load, __dir__ = names_on_first_use(globals())


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        globals()[name] = version("rallypoint")
        return globals()[name]
    return _load(name)
