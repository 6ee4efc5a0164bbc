"""The agent: starts the workers of this machine, watches them, and ends everything it started.

For Python programs the package has the names of torch.distributed.run, .launcher and the commonly
used parts of .elastic.agent. They are loaded on first use: the command line does not need them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.cli.in_process import config_from_args, get_args_parser, main, parse_args, run
    from rallypoint.launch.api.elastic_agent import (
        LocalElasticAgent,
        RunResult,
        WorkerSpec,
        WorkerState,
    )
    from rallypoint.launch.api.elastic_launch import elastic_launch
    from rallypoint.launch.api.launch_config import DefaultLogsSpecs, LaunchConfig, Std
    from rallypoint.launch.child_failure import ChildFailedError, ProcessFailure

_HOMES = {
    "ChildFailedError": "rallypoint.launch.child_failure",
    "DefaultLogsSpecs": "rallypoint.launch.api.launch_config",
    "LaunchConfig": "rallypoint.launch.api.launch_config",
    "LocalElasticAgent": "rallypoint.launch.api.elastic_agent",
    "ProcessFailure": "rallypoint.launch.child_failure",
    "RunResult": "rallypoint.launch.api.elastic_agent",
    "Std": "rallypoint.launch.api.launch_config",
    "WorkerSpec": "rallypoint.launch.api.elastic_agent",
    "WorkerState": "rallypoint.launch.api.elastic_agent",
    "elastic_launch": "rallypoint.launch.api.elastic_launch",
}
# Names of the command line, for Python programs. It is above this package, which only knows its
# name.
_COMMAND_LINE = ("main", "get_args_parser", "parse_args", "run", "config_from_args")
_HOMES.update(dict.fromkeys(_COMMAND_LINE, "rallypoint.cli.in_process"))

__all__ = [
    "ChildFailedError",
    "DefaultLogsSpecs",
    "LaunchConfig",
    "LocalElasticAgent",
    "ProcessFailure",
    "RunResult",
    "Std",
    "WorkerSpec",
    "WorkerState",
    "config_from_args",
    "elastic_launch",
    "get_args_parser",
    "main",
    "parse_args",
    "run",
]


def __getattr__(name: str) -> object:
    """Load the Python API on first use: the command line does not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rallypoint.launch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
