"""What to run, as frozen data, and the environment that each worker of it gets.

Pure: the agent's own environment is part of the job; nothing here looks at the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.base.worker_env import (
    HANG_AFTER,
    HANG_AFTER_S,
    LOCAL_ADDR,
    SHUTDOWN_TIMEOUT,
    SHUTDOWN_TIMEOUT_S,
    SIGNALS,
    SILENCE,
    SILENCE_S,
    STANDBY,
    VARIABLES,
    WorkerEnv,
)
from rallypoint.base.worker_hook import CONTROL_FD, FLIGHT_RECORD, FLIGHT_RECORD_BYTES
from rallypoint.launch.log_spec import LogSpec
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.round import Endpoint, Member, Placement, Seat

TOKEN = "RALLYPOINT_TOKEN"  # the name of the variable
HISTORY = "RALLYPOINT_HISTORY"  # off: as --no-history
# Where the guardian puts a worker's end of the control socket, and the memory of its record.
CONTROL_FD_NUMBER = 3
FLIGHT_RECORD_NUMBER = 4
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
LOCAL_RANK_MACRO = "${local_rank}"
MAX_LOCAL_WORKERS = 4096
_CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
_HIP_DEVICES = "HIP_VISIBLE_DEVICES"
# Of the variables that say a place, those that are the same for all workers and rounds.
_OF_JOB = (
    "LOCAL_WORLD_SIZE",
    "ROLE_NAME",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_OF_STANDBYS = (*_OF_JOB, "TORCHELASTIC_ERROR_FILE")  # what a worker knows before it has a place
ELASTIC_BACKENDS = ("c10d", "etcd")  # of a Rendezvous; others are plug-ins


class Nodes(Record, kw_only=True, secret=("token",)):
    """The nodes of a job that are known from the start; by default only this one.

    Attributes:
        count: how many agents take part, known from the start.
        node_rank: this agent's number; agent 0 coordinates.
        master_addr, master_port: where the worker store is. For one node the port may be 0: any
            free one, and a new one in each round.
        join_timeout_s: how long to wait for all of them.
        local_addr: as a Rendezvous's.
        token: the token that agents must know to take part.
    """

    count: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    join_timeout_s: float = 600.0
    local_addr: str | None = None
    token: bytes | None = None

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


class Rendezvous(Record, kw_only=True, secret=("token",)):
    """Nodes that find each other at an endpoint, and may come and go.

    Attributes:
        backend: its name, as in --rdzv-backend; never "static".
        endpoints: the rendezvous endpoints, in the order in which to try.
        run_id: the job's name there; the same as the job's.
        min_nodes, max_nodes: the size of a round.
        configuration: options of the backend, from --rdzv-conf.
        node_rank: the rank that this node asks for; None: any.
        local_addr: the address at which others reach this node, from --local-addr; None: chosen
            automatically.
        token: the token that nodes must know to take part.
    """

    backend: str
    endpoints: tuple[Endpoint, ...]
    run_id: str
    min_nodes: int
    max_nodes: int
    configuration: Mapping[str, str] = MappingProxyType({})
    node_rank: int | None = None
    local_addr: str | None = None
    token: bytes | None = None

    def __post_init__(self) -> None:
        if self.backend == "etcd-v2":
            raise InvalidArgumentError(
                "--rdzv-backend etcd-v2 uses version 2 of etcd's interface, which current servers "
                "do not offer; choose etcd, which uses version 3 at the same endpoint."
            )
        if not self.endpoints:
            raise InvalidArgumentError(
                f"--rdzv-backend {self.backend} needs --rdzv-endpoint HOST:PORT, the same on all"
                " machines."
            )
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise InvalidArgumentError(
                f"--nnodes is {self.min_nodes}:{self.max_nodes}; it must be a minimum and a "
                "maximum, as in 2:4."
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.max_nodes:
            raise InvalidArgumentError(
                f"--node-rank is {self.node_rank}; with at most {self.max_nodes} nodes it must be"
                f" from 0 to {self.max_nodes - 1}."
            )


class Verbosity(Enum):
    """How much the launcher prints while nothing is wrong."""

    QUIET = "nothing"
    NORMAL = "what a user would ask for"
    VERBOSE = "each decision and its reason"


class OnHang(Enum):
    """What to do when the job hangs; the values are those of --on-hang."""

    OFF = "off"
    REPORT = "report"
    RESTART = "restart"
    STOP = "stop"


class Job(Record, kw_only=True, secret=("environ",)):
    """The job of one agent: its workers, the other nodes, and options.

    Attributes:
        command: the program and its arguments; ``${local_rank}`` in an argument is replaced.
        role: what the node's workers do; ranks are also counted within a role.
        max_restarts: how many times the job may be restarted because workers failed.
        environ: what the workers inherit, except for the token.
        rendezvous: how the nodes find each other, if not as `nodes` says.
        shutdown_timeout_s: time for workers to end after the stop signal before they are killed.
        stop_signals: names of the signals that stop the job.
        has_virtual_local_rank: each worker sees only the device of its local rank, with
            LOCAL_RANK=0.
        cpus: by local rank, the CPUs that a worker may run on; empty: all.
        prints_events: also print events on stderr.
        on_hang: what to do when the job hangs.
        hang_after_s: when a wait is long; None: when it takes `HANG_AFTER_S`, and longer than is
            usual in its group.
        spares: how many more workers to start, which wait until they can replace lost ones.
        preload: modules that one process imports, which forks the workers; empty: there is none.
        keeps_history: leave a file with what has happened.
    """

    command: tuple[str, ...]
    local_world_size: int
    run_id: str
    host: str
    environ: Mapping[str, str]
    role: str = "default"
    max_restarts: int = 0
    nodes: Nodes = Nodes()
    rendezvous: Rendezvous | None = None
    logs: LogSpec = LogSpec()
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
    stop_signals: tuple[str, ...] = STOP_SIGNALS
    has_virtual_local_rank: bool = False
    cpus: tuple[frozenset[int], ...] = ()
    verbosity: Verbosity = Verbosity.NORMAL
    events_file: str = ""
    prints_events: bool = False
    on_hang: OnHang = OnHang.REPORT
    hang_after_s: float | None = None
    spares: int = 0
    preload: tuple[str, ...] = ()
    keeps_history: bool = True

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
        if not 0 <= self.spares <= MAX_LOCAL_WORKERS - self.local_world_size:
            raise InvalidArgumentError(
                f"cannot run {self.local_world_size} workers and {self.spares} spares on one"
                f" machine; ask for at most {MAX_LOCAL_WORKERS} together."
            )
        if self.cpus and len(self.cpus) != self.local_world_size:
            raise InvalidArgumentError("give one set of CPUs for each worker, or none.")

    @property
    def has_template(self) -> bool:
        """Whether workers are forked: where more than one process would import the modules."""
        rendezvous = self.rendezvous
        may_change = rendezvous is not None and rendezvous.min_nodes < rendezvous.max_nodes
        has_more = self.local_world_size + self.spares > 1 or self.max_restarts > 0
        return bool(self.preload) and (has_more or may_change)

    @property
    def member(self) -> Member:
        """This agent, as the others see it."""
        return Member(
            key=str(self.nodes.node_rank),
            wish=self.nodes.node_rank,
            host=self.host,
            local_world_size=self.local_world_size,
            role=self.role,
        )

    @property
    def least_hang_s(self) -> float:
        """No wait is long before this time."""
        return HANG_AFTER_S if self.hang_after_s is None else self.hang_after_s

    @property
    def token(self) -> bytes:
        """What the nodes must know to take part, or nothing."""
        given = (self.rendezvous or self.nodes).token
        return given or self.environ.get(TOKEN, "").encode(errors="surrogateescape")

    @property
    def limits(self) -> Limits:
        """The number of agents."""
        count, timeout_s = self.nodes.count, self.nodes.join_timeout_s
        return Limits(min_nodes=count, max_nodes=count, join_timeout_s=timeout_s, is_fixed=True)

    @property
    def to_find_out(self) -> str:
        """How the user finds out what keeps the nodes from connecting, as the end of a sentence."""
        nodes, rendezvous = self.nodes, self.rendezvous
        begin = "to find out more, end this and run `rallypoint doctor --nnodes"
        if rendezvous is None:
            at = f"--master-addr {nodes.master_addr} --master-port {nodes.master_port}"
            own = f"{begin} {nodes.count} --node-rank {nodes.node_rank} {at}`"
            return f"{own} here, and the same with its own --node-rank on each other node"
        fewest, most = rendezvous.min_nodes, rendezvous.max_nodes
        count = f"{most}" if fewest == most else f"{fewest}:{most}"
        at = f"--rdzv-endpoint {','.join(map(str, rendezvous.endpoints))}"
        return f"{begin} {count} --rdzv-backend {rendezvous.backend} {at}` on each node"

    def worker_command(self, local_rank: int) -> tuple[str, ...]:
        """The arguments of one worker's program."""
        program, *arguments = self.command
        number = str(local_rank)
        return (program, *(_substitute(text, number) for text in arguments))


def with_silence(job: Job, silence_s: int) -> Job:
    """The job, with workers that wait for a silent machine as long as its agents do."""
    if silence_s <= SILENCE_S:
        return job
    return job.__replace__(environ={SILENCE: str(silence_s), **job.environ})


def round_secret(token: bytes, run_id: str, number: int) -> str:
    """A secret that workers get instead of the job's token: the same on all nodes, for one round.

    A process that reads it in a worker's environment can join that round's groups, but not the job.
    """
    import hmac  # slow, and needed only for jobs with a token

    text = f"round {number} of {run_id}".encode()
    return hmac.digest(token, text, "sha256").hex()


def _substitute(text: str, number: str) -> str:
    """As torchrun does; a doubled dollar sign writes the macro itself."""
    parts = text.split("$" + LOCAL_RANK_MACRO)
    return LOCAL_RANK_MACRO.join(part.replace(LOCAL_RANK_MACRO, number) for part in parts)


def place_environ(
    job: Job, *, place: Placement, seat: Seat, error_file: str | None = None
) -> dict[str, str]:
    """The variables that say a worker's place in a round: torchrun's, and the round's secret."""
    contract = WorkerEnv(
        rank=place.rank,
        world_size=seat.world_size,
        local_rank=place.local_rank,
        local_world_size=job.local_world_size,
        group_rank=seat.node_rank,
        group_world_size=seat.nodes,
        role_name=job.role,
        role_rank=place.role_rank,
        role_world_size=seat.role_world_size,
        master_addr=seat.store.host,
        master_port=seat.store.port,
        restart_count=seat.number,
        max_restarts=job.max_restarts,
        run_id=job.run_id,
        use_agent_store=True,
        error_file=error_file,
    )
    environ = contract.to_environ()
    if job.has_virtual_local_rank:
        environ["LOCAL_RANK"] = "0"
    if job.token:
        environ[TOKEN] = round_secret(job.token, job.run_id, seat.number)
    return environ


def worker_environ(
    job: Job,
    *,
    place: Placement,
    seat: Seat,
    error_file: str | None,
    record_slot: int | None = None,
) -> dict[str, str]:
    """All variables of one worker: the inherited ones, torchrun's, and some of our own.

    Args:
        place: its rank is -1 for a worker on standby, which gets its place later.
        record_slot: where its flight record is; its local rank, unless given.
    """
    is_standby = place.rank < 0
    known = place.__replace__(rank=0, role_rank=0, local_rank=0) if is_standby else place
    contract = place_environ(job, place=known, seat=seat, error_file=error_file)
    if is_standby:
        contract = {name: contract[name] for name in _OF_STANDBYS if name in contract}
        if place.local_rank < job.local_world_size:
            contract["LOCAL_RANK"] = str(place.local_rank)
        contract[STANDBY] = "1"
    environ = _shared_environ(job)
    environ.update(contract)
    if job.has_virtual_local_rank:
        # ROCm reads HIP_VISIBLE_DEVICES first, and so do we, like torchrun.
        source = _HIP_DEVICES if job.environ.get(_HIP_DEVICES) else _CUDA_DEVICES
        device = _device_of(place.local_rank, source, job.environ.get(source))
        environ[source] = environ[_CUDA_DEVICES] = device
    environ[CONTROL_FD] = str(CONTROL_FD_NUMBER)
    offset = (place.local_rank if record_slot is None else record_slot) * FLIGHT_RECORD_BYTES
    environ[FLIGHT_RECORD] = f"{FLIGHT_RECORD_NUMBER}:{offset}"
    return environ


def rank_variables(job: Job) -> tuple[str, ...]:
    """The variables that a worker reads, and that differ by rank or by round."""
    own = [name for name in VARIABLES if name not in _OF_JOB]
    devices = [_CUDA_DEVICES, _HIP_DEVICES] if job.has_virtual_local_rank else []
    return (*own, *devices, STANDBY, TOKEN)


def template_environ(job: Job, *, error_file: str | None) -> dict[str, str]:
    """The variables of the process that forks the workers: those that all of these have."""
    environ = _shared_environ(job)
    for name in rank_variables(job):
        environ.pop(name, None)
    values = (job.local_world_size, job.role, job.max_restarts, job.run_id, True)
    environ |= {name: str(value) for name, value in zip(_OF_JOB, values, strict=True)}
    if error_file:
        environ["TORCHELASTIC_ERROR_FILE"] = error_file
    return environ


def _shared_environ(job: Job) -> dict[str, str]:
    """The variables that all workers have."""
    environ = dict(job.environ)
    environ.pop(TOKEN, None)  # workers have secrets of their rounds
    environ.pop("TORCHELASTIC_ERROR_FILE", None)  # an outer launcher's, if ours has none
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if job.local_world_size > 1:
        # As in torchrun: several workers that each use all cores slow each other down.
        environ.setdefault("OMP_NUM_THREADS", "1")
    environ[SIGNALS] = ",".join(job.stop_signals)
    if SHUTDOWN_TIMEOUT in environ or job.shutdown_timeout_s != SHUTDOWN_TIMEOUT_S:
        environ[SHUTDOWN_TIMEOUT] = f"{job.shutdown_timeout_s:g}"  # read by `time_left`
    environ.pop(HANG_AFTER, None)  # an outer launcher's
    hang_after_s = 0.0 if job.on_hang is OnHang.OFF else job.hang_after_s
    if hang_after_s is not None:
        environ[HANG_AFTER] = f"{hang_after_s:g}"
    environ.pop(LOCAL_ADDR, None)  # an outer launcher's
    local_addr = (job.rendezvous or job.nodes).local_addr
    if local_addr:
        environ[LOCAL_ADDR] = local_addr
    return environ


def _device_of(local_rank: int, variable: str, visible: str | None) -> str:
    """The value of `variable` that shows this worker only its own device."""
    if visible is None:
        return str(local_rank)
    devices = [each.strip() for each in visible.split(",") if each.strip()]
    if local_rank >= len(devices):
        raise InvalidArgumentError(
            f"--virtual-local-rank: {variable}={visible} has no device for local rank"
            f" {local_rank}; start fewer workers, or make more devices visible."
        )
    return devices[local_rank]
