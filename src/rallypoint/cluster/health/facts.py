"""The facts about each node and each pair of nodes under examination. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What a name means on a node; `error`: why it means nothing."""

    host: str
    addresses: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface that is up. `speed_mbps` 0: it does not say."""

    name: str
    addresses: tuple[str, ...] = ()
    mtu: int = 0
    speed_mbps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The address that a node gives to others.

    Attributes:
        address: empty if there is none; then `error` says why.
        interface: the interface that has it.
        by: the setting that chose it, as in ``RALLYPOINT_SOCKET_IFNAME=eth0``; empty: the route.
    """

    address: str = ""
    interface: str = ""
    by: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port that this node is to listen at; `held_by`: who listens there already."""

    endpoint: str
    held_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Where a job writes. `device` is the same for two places of one file system."""

    what: str
    path: str
    device: str
    free_bytes: int
    total_bytes: int
    has_inodes: bool = True


class PathState(Enum):
    """What became of an attempt to use a path."""

    GOOD = "can be read and written"
    READ_ONLY = "cannot be written"
    UNREADABLE = "cannot be read"
    MISSING = "does not exist"
    HANGS = "does not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLook:
    """A file or directory that the job needs. `digest`: of the contents, if it is the script."""

    path: str
    state: PathState
    detail: str = ""
    digest: str = ""
    is_script: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """GPUs, as the kernel's files tell. `visible`: those that CUDA_VISIBLE_DEVICES leaves."""

    gpus: int = 0
    visible: int = 0
    has_infiniband: bool = False
    cpus: float = 1.0  # that may be used: by affinity and by the control group's quota


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How much of something is used, of how much at most; 0 at most: that is not known."""

    used: int = 0
    most: int = 0

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.used / self.most if self.most else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of this process and its machine; -1: there is none.

    Attributes:
        open_files: how many a process may open, if it asks for all it may have.
        memlock_bytes: how much memory a process may lock, as RDMA does.
        memory: of the control group.
        conntrack, ports, tcp_pages: of the kernel's network.
    """

    open_files: int = -1
    memlock_bytes: int = -1
    memory: Usage = Usage()
    conntrack: Usage = Usage()
    ports: Usage = Usage()
    tcp_pages: Usage = Usage()
    somaxconn: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a node was recognised as being in.

    Attributes:
        place: such as "Slurm step 12.0"; empty: nothing is recognised.
        wrong: why no job of several nodes can begin there.
        note: what a user should know.
    """

    place: str = ""
    wrong: str = ""
    note: str = ""


NOWHERE = Surroundings()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node.

    Attributes:
        number: its node rank, or its place in --hosts.
        name: what lines about it begin with.
        own_name: what its host name means to itself.
        names: what the names of the other nodes, and of the endpoints, mean there.
        addresses: all of its own.
        probe_port: where it listens for probes; 0: nowhere, and `probe_error` says why.
        is_meeting_here: it is the endpoint's node.
        ports: those endpoints that are this node.
        versions: by what it is the version of.
        settings: the environment variables that the checks know; secrets are not among them.
        bypasses_proxy: the hosts to which `no_proxy` allows direct connections.
        workers: as in --nproc-per-node.
        jobs: running jobs of this user's on that node.
    """

    number: int
    name: str
    own_name: Lookup
    names: tuple[Lookup, ...] = ()
    addresses: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    choice: Choice = Choice()
    probe_port: int = 0
    probe_error: str = ""
    ports: tuple[Port, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    bypasses_proxy: tuple[str, ...] = ()
    devices: Devices = Devices()
    workers: str = ""
    limits: Limits = Limits()
    disks: tuple[Disk, ...] = ()
    paths: tuple[PathLook, ...] = ()
    has_token: bool = False
    surroundings: Surroundings = NOWHERE
    jobs: tuple[str, ...] = ()


MEETING = "where the nodes are to meet"


class Reach(Enum):
    """How an attempt to connect ended."""

    REACHED = "reached"
    REFUSED = "refused"
    DROPPED = "no answer"
    UNREACHABLE = "no route"
    UNKNOWN = "unknown name"
    STRANGER = "another program answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One node's attempts to speak with another one, in this direction.

    Attributes:
        source, target: numbers of nodes.
        reach: of the address that the target gives out.
        detail: the system's word for it.
        other_address: another address of the target that was reached where that one was not.
        latency_us: of a small message and its answer, the best of some; 0: not measured.
        stalls: small messages arrive, and no byte of a large one.
        mbit_s: how fast data went; 0: not measured.
    """

    source: int
    target: int
    reach: Reach
    detail: str = ""
    other_address: str = ""
    latency_us: float = 0.0
    stalls: bool = False
    mbit_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointProbe:
    """One node's attempt to reach an endpoint. `role`: what is there."""

    source: int
    host: str
    port: int
    reach: Reach
    detail: str = ""
    role: str = MEETING


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A node of which nothing could be learnt, and why.

    Attributes:
        name: what it is called.
        why: as a sentence; `advice`: what to do.
        check: the number of the check that it belongs to.
    """

    name: str
    why: str
    advice: str
    check: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """All that is known.

    Attributes:
        count: how many nodes the job is to have.
        nodes: those that were looked at.
        clocks_s: by number, how far the node's clock is ahead of the examiner's.
        hosts: by the name that others know a node by, its number.
        endpoints: where the nodes are to meet, as (host, port).
        draws_token: whoever starts the job draws a token for it.
        port_range: as in --port-range.
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
        """Whether it is about several nodes."""
        return self.count > 1

    def node(self, number: int) -> NodeFacts:
        """The node of that number."""
        return next(node for node in self.nodes if node.number == number)

    def name(self, number: int) -> str:
        """What it is called."""
        return next((node.name for node in self.nodes if node.number == number), f"node {number}")
