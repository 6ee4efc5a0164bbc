"""The facts about each node and each pair of nodes under examination. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

SHM = "/dev/shm"
# What versions and settings are called.
DRIVER = "NVIDIA driver"
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What a name resolves to on a node; `error`: why it does not."""

    host: str
    addresses: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFact:
    """A network interface that is up. `speed_mbps` is 0 if unknown."""

    name: str
    addresses: tuple[str, ...] = ()
    mtu: int = 0
    speed_mbps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressFact:
    """The address that a node gives to others; empty if there is none, and `error` says why.

    `by` is the setting that chose it, as in ``RALLYPOINT_SOCKET_IFNAME=eth0``; empty: the route.
    """

    address: str = ""
    interface: str = ""
    by: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port where this node should listen: which program does already, or another `error`."""

    endpoint: str
    held_by: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A directory where a job writes. `device` is equal for those on the same file system."""

    what: str
    path: str
    device: str
    free_bytes: int
    total_bytes: int
    has_inodes: bool = True


class PathState(Enum):
    """The result of an attempt to use a path."""

    GOOD = "can be read and written"
    READ_ONLY = "cannot be written"
    UNREADABLE = "cannot be read"
    MISSING = "does not exist"
    HANGS = "does not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLook:
    """A file or directory that the job needs. `digest`: of the contents, for the script."""

    path: str
    state: PathState
    detail: str = ""
    digest: str = ""
    is_script: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The GPUs that the kernel's files list, and how many CUDA_VISIBLE_DEVICES leaves `visible`.

    `cpus` is how many may be used, by affinity and the control group's quota.
    """

    gpus: int = 0
    visible: int = 0
    models: tuple[str, ...] = ()
    has_infiniband: bool = False
    cpus: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How much of something is used, and the maximum; a maximum of 0 is unknown."""

    used: int = 0
    most: int = 0

    @property
    def share(self) -> float:
        """The used share, from 0 to 1."""
        return self.used / self.most if self.most else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """The limits of this process and its machine; -1: unlimited.

    Attributes:
        open_files: how many files a process may open after raising its limit to the maximum.
        memlock_bytes: how much memory a process may lock, as RDMA does.
        processes: how many processes and threads this user may have.
        memory, pids: the control group's memory, and its processes and threads.
        conntrack, ports, tcp_pages: those of the kernel's network.
        congestion_control: the algorithm of new TCP connections; empty if unknown.
    """

    open_files: int = -1
    memlock_bytes: int = -1
    processes: int = -1
    memory: Usage = Usage()
    pids: Usage = Usage()
    conntrack: Usage = Usage()
    ports: Usage = Usage()
    tcp_pages: Usage = Usage()
    somaxconn: int = 4096
    congestion_control: str = ""

    @property
    def free_pids(self) -> int:
        """How many more processes and threads may start, as far as it is known; -1: unlimited."""
        known = [self.processes] if self.processes >= 0 else []
        known += [max(0, self.pids.most - self.pids.used)] if self.pids.most else []
        return min(known, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The environment that was recognised around a node.

    Attributes:
        place: such as "Slurm step 12.0"; empty if nothing is recognised.
        wrong: why a job of several nodes cannot start there.
    """

    place: str = ""
    wrong: str = ""
    note: str = ""


NOWHERE = Surroundings()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node.

    Attributes:
        number: its node rank, or its position in --hosts.
        name: the name at the beginning of lines about it.
        own_name: what its host name resolves to on itself.
        names: what the names of the other nodes, and of the endpoints, resolve to there.
        probe_port: where it listens for probes; 0 if nowhere, and `probe_error` says why.
        ports: the endpoints on this node.
        settings: the environment variables that the checks know; secrets are not among them.
        bypasses_proxy: the hosts to which `no_proxy` allows direct connections.
        workers: as in --nproc-per-node.
        jobs: this user's running jobs on that node.
    """

    number: int
    name: str
    own_name: Lookup
    names: tuple[Lookup, ...] = ()
    addresses: tuple[str, ...] = ()
    interfaces: tuple[InterfaceFact, ...] = ()
    choice: AddressFact = AddressFact()
    probe_port: int = 0
    probe_error: str = ""
    ports: tuple[Port, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    bypasses_proxy: tuple[str, ...] = ()
    devices: DeviceFacts = DeviceFacts()
    workers: str = ""
    limits: ProcessLimits = ProcessLimits()
    disks: tuple[Disk, ...] = ()
    paths: tuple[PathLook, ...] = ()
    has_token: bool = False
    surroundings: Surroundings = NOWHERE
    jobs: tuple[str, ...] = ()

    def interface_of(self, address: str) -> str:
        """The name of the interface that has this address; empty if none has."""
        return next((each.name for each in self.interfaces if address in each.addresses), "")


MEETING = "the rendezvous endpoint"
# Faster links are never called slow, however fast others are. Slower ones are measured again: a
# machine may have been busy.
SLOW_MBIT_S = 250.0


class ConnectOutcome(Enum):
    """How an attempt to connect ended."""

    REACHED = "reached"
    REFUSED = "refused"
    DROPPED = "no answer"
    UNREACHABLE = "no route"
    UNKNOWN = "unknown name"
    STRANGER = "another program answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One node's attempts to communicate with another one, in this direction.

    Attributes:
        outcome: for the address that the target gives to others; `detail`: the system's error.
        other_address: another address of the target, which was reached although that one was not.
        latency_us: of a small message and its answer, the best of several; 0 if not measured.
        stalls: small messages arrive, but no byte of a large one.
        mbit_s: the data rate; 0 if not measured.
    """

    source: int
    target: int
    outcome: ConnectOutcome
    detail: str = ""
    other_address: str = ""
    latency_us: float = 0.0
    stalls: bool = False
    mbit_s: float = 0.0

    @property
    def pair(self) -> tuple[int, int]:
        """Who tried to reach whom."""
        return self.source, self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointProbe:
    """One node's attempt to reach an endpoint. `role`: the kind of endpoint."""

    source: int
    host: str
    port: int
    outcome: ConnectOutcome
    detail: str = ""
    role: str = MEETING


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A node about which nothing could be found out: `why`, as a sentence, and what to do."""

    name: str
    why: str
    advice: str
    check: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """All facts about the nodes of a job.

    Attributes:
        count: the number of nodes that the job needs.
        clocks_s: by node number, how far its clock is ahead of the examiner's.
        hosts: node numbers, by the name that others use for the node.
        endpoints: the rendezvous endpoints, as (host, port).
        draws_token: the program that starts the job generates a token for it.
    """

    count: int = 1
    nodes: tuple[NodeFacts, ...] = ()
    probes: tuple[Probe, ...] = ()
    endpoint_probes: tuple[EndpointProbe, ...] = ()
    absences: tuple[Absence, ...] = ()
    clocks_s: Mapping[int, float] = field(default_factory=dict)
    hosts: Mapping[str, int] = field(default_factory=dict)
    endpoints: tuple[tuple[str, int], ...] = ()
    draws_token: bool = False
    port_range: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether the job has several nodes."""
        return self.count > 1

    def name(self, number: int) -> str:
        """What it is called."""
        return next((node.name for node in self.nodes if node.number == number), f"node {number}")
