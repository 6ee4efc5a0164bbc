"""`WorkerSpec`, `LocalElasticAgent` and `RunResult`, for programs that create torchelastic's agent:
``LocalElasticAgent(WorkerSpec(..., rdzv_handler=handler), logs_specs).run()``.

They run our agent, which takes its rounds from the handler. There are no abstract agents to
subclass: torch's subclasses replace steps of a polling loop, which ours does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.launch.api.elastic_launch import Entrypoint, failures_of, launch
from rallypoint.launch.api.launch_config import LaunchConfig
from rallypoint.launch.child_failure import ProcessFailure
from rallypoint.launch.rounds.plug_in import rounds_through
from rallypoint.rendezvous.api.rendezvous_handler import RendezvousHandler


class WorkerState(Enum):
    """How the workers of a node ended."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class WorkerSpec:
    """The workers of a node; torch's fields, in its order.

    Attributes:
        rdzv_handler: from `rallypoint.rendezvous`.
        fn: an older name of `entrypoint`.
        entrypoint: a function, or a program; `args` are its arguments.
        master_port, master_addr: accepted for compatibility with torch and ignored: the handler
            says where the store is.

    The others are `LaunchConfig`'s.
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Entrypoint | None = None
    entrypoint: Entrypoint | None = None
    args: tuple[object, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        self.entrypoint = self.fn or self.entrypoint
        if not self.entrypoint:
            raise InvalidArgumentError("a WorkerSpec needs an entrypoint: a function or a program.")


@dataclass
class RunResult:
    """How it ended: `return_values` and `failures` by global rank, of this node's workers."""

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether the job failed."""
        return self.state is WorkerState.FAILED


class LocalElasticAgent:
    """Runs the workers of a node.

    Args:
        spec: the workers.
        logs_specs, log_line_prefix_template, shutdown_timeout: as `LaunchConfig`'s.
        start_method, exit_barrier_timeout: accepted for compatibility with torch and ignored:
            workers always start as new interpreters, and nodes notify each other when they have
            finished.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: Any = None,  # noqa: ANN401 - ours or torch's
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float | None = None,
    ) -> None:
        self._spec = spec
        self._config = LaunchConfig(
            nproc_per_node=spec.local_world_size,
            logs_specs=logs_specs,
            run_id=spec.rdzv_handler.get_run_id(),
            role=spec.role,
            max_restarts=spec.max_restarts,
            monitor_interval=spec.monitor_interval,
            start_method=start_method,
            log_line_prefix_template=log_line_prefix_template,
            local_addr=spec.local_addr,
            event_log_handler=spec.event_log_handler,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
            virtual_local_rank=spec.virtual_local_rank,
            shutdown_timeout=shutdown_timeout,
        )

    def run(self, role: str = "") -> RunResult:
        """Run the workers to their end.

        Raises:
            WorkersFailedError: a signal stopped the job, or another node failed.
        """
        spec = self._spec
        assert spec.entrypoint is not None
        result, values = launch(
            self._config,
            spec.entrypoint,
            spec.args,
            lambda job: rounds_through(spec.rdzv_handler, job),
        )
        if not result.status:
            return RunResult(WorkerState.SUCCEEDED, values)
        return RunResult(WorkerState.FAILED, failures=failures_of(result))
