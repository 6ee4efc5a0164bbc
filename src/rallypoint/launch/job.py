"""What to run, as frozen data, and the environment that each worker of it gets.

Pure: the agent's own environment is part of the job; nothing here looks at the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.worker_env import WorkerEnv
from rallypoint.base.worker_hook import CONTROL_FD
from rallypoint.launch.round import Member, Placement, Round

# Where the guardian puts a worker's end of the control socket.
CONTROL_FD_NUMBER = 3
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
LOCAL_RANK_MACRO = "${local_rank}"
MAX_LOCAL_WORKERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What the workers of one node are.

    Attributes:
        command: the program and its arguments; ``${local_rank}`` in an argument is replaced.
        role: what the node's workers do; ranks are also counted within a role.
        max_restarts: how many new rounds the job may take because workers failed.
    """

    command: tuple[str, ...]
    local_world_size: int
    role: str = "default"
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidArgumentError("the job has no command; name a program to run.")
        if not 1 <= self.local_world_size <= MAX_LOCAL_WORKERS:
            raise InvalidArgumentError(
                f"cannot run {self.local_world_size} workers on one machine;"
                f" ask for 1 to {MAX_LOCAL_WORKERS}."
            )
        if self.max_restarts < 0:
            raise InvalidArgumentError(
                f"--max-restarts is {self.max_restarts}; it must be 0 or more."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """With which other nodes the job runs; as given, it runs on one alone.

    Attributes:
        count: how many agents take part, known from the start.
        node_rank: which of them this one is; agent 0 coordinates.
        master_addr, master_port: where the worker store is. For one node the port may be 0, any
            free one, and a new one in each round.
        join_timeout_s: how long to wait for all of them.
        token: what agents must know to take part.
    """

    count: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    join_timeout_s: float = 600.0
    token: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InvalidArgumentError(f"--nnodes is {self.count}; it must be 1 or more.")
        if not 0 <= self.node_rank < self.count:
            raise InvalidArgumentError(
                f"--node-rank is {self.node_rank}; with --nnodes {self.count} it must be from 0 to"
                f" {self.count - 1}."
            )
        if not 0 <= self.master_port < 65536 or (self.count > 1 and not self.master_port):
            raise InvalidArgumentError(
                f"--master-port is {self.master_port}; it must be a port from 1 to 65535, the same"
                " on all nodes."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(WorkerSpec):
    """What one agent is to do: which workers, with which other nodes, and how.

    Attributes:
        environ: what the workers inherit.
        log_prefix: a format with {rank}, {local_rank} and {host} that each line of the workers'
            output begins with; None: the workers write to the agent's own stdout and stderr.
        shutdown_timeout_s: from the signal to stop until what still runs is killed.
    """

    run_id: str
    host: str
    environ: Mapping[str, str] = field(repr=False)
    nodes: Nodes = Nodes()
    log_prefix: str | None = None
    shutdown_timeout_s: float = 30.0
    verbose: bool = False

    def __post_init__(self) -> None:
        WorkerSpec.__post_init__(self)  # not super(): slots make this another class
        if self.log_prefix is not None:
            format_prefix(self.log_prefix, rank=0, local_rank=0, host="")

    @property
    def member(self) -> Member:
        """This agent, as the others see it."""
        return Member(
            node_rank=self.nodes.node_rank,
            host=self.host,
            local_world_size=self.local_world_size,
            role=self.role,
        )

    def worker_command(self, local_rank: int) -> tuple[str, ...]:
        """The arguments of one worker's program."""
        program, *arguments = self.command
        number = str(local_rank)
        return (program, *(text.replace(LOCAL_RANK_MACRO, number) for text in arguments))


def worker_environ(
    job: Job, *, place: Placement, of: Round, error_file: str | None
) -> dict[str, str]:
    """All variables of one worker: the inherited ones, torchrun's, and the control socket's."""
    contract = WorkerEnv(
        rank=place.rank,
        world_size=of.world_size,
        local_rank=place.local_rank,
        local_world_size=job.local_world_size,
        group_rank=job.nodes.node_rank,
        group_world_size=len(of.members),
        role_name=job.role,
        role_rank=place.role_rank,
        role_world_size=of.role_world_size(job.role),
        master_addr=of.store.host,
        master_port=of.store.port,
        restart_count=of.number,
        max_restarts=job.max_restarts,
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
