"""What to run, as frozen data, and the environment that each worker of it gets.

Pure: the agent's own environment is part of the job; nothing here looks at the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.worker_env import WorkerEnv
from rallypoint.base.worker_hook import CONTROL_FD

# Where the guardian puts a worker's end of the control socket.
CONTROL_FD_NUMBER = 3
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
LOCAL_RANK_MACRO = "${local_rank}"
MAX_LOCAL_WORKERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of one machine.

    Attributes:
        command: the program and its arguments; ``${local_rank}`` in an argument is replaced.
        environ: what the workers inherit.
        log_prefix: a format with {rank}, {local_rank} and {host} that each line of the workers'
            output begins with; None: the workers write to the agent's own stdout and stderr.
        shutdown_timeout_s: from the signal to stop until what still runs is killed.
    """

    command: tuple[str, ...]
    local_world_size: int
    run_id: str
    host: str
    environ: Mapping[str, str] = field(repr=False)
    log_prefix: str | None = None
    shutdown_timeout_s: float = 30.0
    verbose: bool = False

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidArgumentError("the job has no command; name a program to run.")
        if not 1 <= self.local_world_size <= MAX_LOCAL_WORKERS:
            raise InvalidArgumentError(
                f"cannot run {self.local_world_size} workers on one machine;"
                f" ask for 1 to {MAX_LOCAL_WORKERS}."
            )
        if self.log_prefix is not None:
            format_prefix(self.log_prefix, rank=0, local_rank=0, host="")

    def worker_command(self, local_rank: int) -> tuple[str, ...]:
        """The arguments of one worker's program."""
        program, *arguments = self.command
        number = str(local_rank)
        return (program, *(text.replace(LOCAL_RANK_MACRO, number) for text in arguments))


def worker_environ(
    job: Job, *, local_rank: int, store: Endpoint, error_file: str | None
) -> dict[str, str]:
    """All variables of one worker: the inherited ones, torchrun's, and the control socket's."""
    contract = WorkerEnv(
        rank=local_rank,
        world_size=job.local_world_size,
        local_rank=local_rank,
        local_world_size=job.local_world_size,
        group_rank=0,
        group_world_size=1,
        role_name="default",
        role_rank=local_rank,
        role_world_size=job.local_world_size,
        master_addr=store.host,
        master_port=store.port,
        run_id=job.run_id,
        use_agent_store=True,
        error_file=error_file,
    )
    environ = dict(job.environ)
    environ.pop("TORCHELASTIC_ERROR_FILE", None)  # an outer launcher's, if ours has none
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if job.local_world_size > 1:
        # As torchrun: several workers that each use all cores slow each other down.
        environ.setdefault("OMP_NUM_THREADS", "1")
    environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(STOP_SIGNALS)
    environ.update(contract.to_environ())
    environ[CONTROL_FD] = str(CONTROL_FD_NUMBER)
    return environ


def format_prefix(template: str, *, rank: int, local_rank: int, host: str) -> str:
    """Fill in a log prefix.

    Raises:
        InvalidArgumentError: the template is not a format of these three.
    """
    try:
        return template.format(rank=rank, local_rank=local_rank, host=host)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        raise InvalidArgumentError(
            f"{template!r} is not a log prefix; it may use {{rank}}, {{local_rank}} and {{host}},"
            " as in '{rank}: '."
        ) from None
