"""The agent: starts the workers of this machine, watches them, and ends everything it started."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.launch.api import LaunchConfig, elastic_launch

__all__ = ["LaunchConfig", "elastic_launch"]


def __getattr__(name: str) -> object:
    """Load the Python API on first use: the command line does without it."""
    if name not in __all__:
        raise AttributeError(f"module 'rallypoint.launch' has no attribute {name!r}")
    from rallypoint.launch import api

    return getattr(api, name)
