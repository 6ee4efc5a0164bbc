"""Launching from Python: `elastic_launch`, with torch's names.

The caller's process is the agent for the duration of the call, in whichever thread.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from rallypoint.base.errors import InvalidArgumentError, WorkersFailedError
from rallypoint.launch.agent.final_reports import JobResult
from rallypoint.launch.agent.loop import perform
from rallypoint.launch.agent.signals import read_signals
from rallypoint.launch.api.call import read_result, write_call
from rallypoint.launch.api.launch_config import (
    LaunchConfig,
    cpus_of,
    logs_of,
    nodes_of,
    rendezvous_of,
)
from rallypoint.launch.child_failure import ChildFailedError, ProcessFailure, process_failures
from rallypoint.launch.job import Job
from rallypoint.launch.rounds.source import RoundSource

Entrypoint = Callable[..., Any] | str


class elastic_launch:  # noqa: N801 - torch's name
    """Run a function or a program in the workers of a job: ``elastic_launch(config, f)(*args)``.

    The call returns the return values of this node's workers by global rank; for a program the
    values are None. A function must be defined at the top level of a module or script, unless
    cloudpickle is installed.

    Raises:
        InvalidArgumentError: function or arguments cannot be passed to other processes.
        ChildFailedError: workers of this node failed; `failures` describes each.
        WorkersFailedError: the job was stopped by a signal, or failed on another node.
    """

    def __init__(
        self, config: LaunchConfig, entrypoint: Entrypoint, health_check_server: object = None
    ) -> None:
        if health_check_server is not None:
            raise InvalidArgumentError(
                "health_check_server works only with torch's own agent; leave it out."
            )
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: object) -> dict[int, Any]:
        """Launch, and wait for the end."""
        result, values = launch(self._config, self._entrypoint, args)
        raise_if_failed(result, name_of(self._entrypoint, args))
        return values


def launch(
    config: LaunchConfig,
    entrypoint: Entrypoint,
    args: tuple[object, ...],
    rounds: Callable[[Job], RoundSource] | None = None,
) -> tuple[JobResult, dict[int, Any]]:
    """Launch and wait; returns how the job ended, and what the workers returned."""
    if not config.run_id:  # several nodes could not agree on a random name
        alone = config.max_nodes == 1
        config.run_id = str(int.from_bytes(os.urandom(16))) if alone else "none"
    with tempfile.TemporaryDirectory(prefix="rallypoint_call_") as directory:
        path = f"{directory}/call"
        if isinstance(entrypoint, str):
            command = (entrypoint, *map(str, args))
        else:
            write_call(path, entrypoint, args, with_number=False)
            command = (sys.executable, "-u", "-m", "rallypoint.launch.api.call", path)
        job = job_of(config, command)
        result = perform(job, rounds and rounds(job))
        if isinstance(entrypoint, str):
            return result, dict.fromkeys(result.ranks)
        values = {rank: read_result(path, rank) for rank in result.ranks}
    return result, {rank: value[0] for rank, value in values.items() if value}


def raise_if_failed(result: JobResult, name: str) -> None:
    """Raise the errors of `elastic_launch`, unless the job succeeded."""
    if result.status:
        raise ChildFailedError(name, failures_of(result), result.status)


def failures_of(result: JobResult) -> dict[int, ProcessFailure]:
    """Which workers of this node made the job fail."""
    failures = process_failures(result.failures)
    # A launch that was stopped by a signal did not fail, whatever its workers made of it.
    if failures and result.status < 128:
        return failures
    raise WorkersFailedError(
        f"the job ended with status {result.status}; the launcher's summary on stderr says why",
        status=result.status,
    )


def job_of(config: LaunchConfig, command: tuple[str, ...]) -> Job:
    """The agent's job, from the configuration."""
    if config.event_log_handler not in ("null", "console"):
        raise InvalidArgumentError(
            f"event_log_handler={config.event_log_handler!r}; it must be null or console."
        )
    return Job(
        command=command,
        local_world_size=config.nproc_per_node,
        role=config.role,
        max_restarts=config.max_restarts,
        run_id=config.run_id,
        host=config.local_addr or os.uname().nodename,
        environ=dict(os.environ if config.environ is None else config.environ),
        nodes=nodes_of(config),
        rendezvous=rendezvous_of(config),
        logs=logs_of(config),
        shutdown_timeout_s=float(config.shutdown_timeout or 0.0),
        stop_signals=read_signals(config.signals_to_handle, "signals_to_handle"),
        has_virtual_local_rank=config.virtual_local_rank,
        cpus=cpus_of(config),
        prints_events=config.event_log_handler == "console",
    )


def name_of(entrypoint: Entrypoint, args: tuple[object, ...]) -> str:
    """The name in errors: the function's name, or the script's."""
    if not isinstance(entrypoint, str):
        return getattr(entrypoint, "__name__", type(entrypoint).__name__)
    scripts = (str(word) for word in args if not str(word).startswith("-"))
    return next(scripts, entrypoint) if entrypoint == sys.executable else entrypoint
