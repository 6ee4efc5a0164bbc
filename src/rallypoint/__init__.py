"""Rallypoint launches distributed training jobs, connects their processes, and explains why a job
fails or hangs.

The public face: torch.distributed's names, which __init__.pyi lists, each once. They are loaded on
first use, so that the launcher, which imports this package too, pays for none of them. __version__
is read from the installed package's metadata in the same way.

    import rallypoint as dist
    dist.init_process_group()
    dist.all_reduce(array)
"""

from __future__ import annotations

import importlib
import sys

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

_homes: dict[str, str] = {}  # public name -> its module


def _public() -> dict[str, str]:
    """All public names, as the stub imports them: ``from MODULE import NAME as NAME``."""
    if not _homes:
        module = ""
        with open(__file__.removesuffix("py") + "pyi", encoding="utf-8") as stub:  # noqa: PTH123
            for line in stub:
                words = line.replace(",", "").split()
                if words[:1] == ["from"]:
                    module = words[1]
                if "as" in words[:-1] and module:
                    _homes[words[words.index("as") + 1]] = module
    return _homes


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name == "__all__":
        return sorted(_public())
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("rallypoint")
    elif name in _public():
        value = getattr(importlib.import_module(_homes[name]), name)
    else:
        raise AttributeError(f"module 'rallypoint' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(_public())
