"""`LaunchConfig`, the argument of `elastic_launch`: torch 2.15's fields in torch's order, and the
parts of a `Job` that they mean. Also `DefaultLogsSpecs` and `Std`, for the workers' output.

Torch's own `DefaultLogsSpecs`, `Std` and `NumaOptions` are accepted too, by their attributes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from types import MappingProxyType
from typing import Any

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.worker_env import SHUTDOWN_TIMEOUT, SHUTDOWN_TIMEOUT_S
from rallypoint.launch.job import Nodes, Rendezvous
from rallypoint.launch.log_spec import STDERR, STDOUT, LogSpec, StreamMap, translate_template
from rallypoint.rendezvous.job.round import Endpoint

DEFAULT_STATIC_PORT, DEFAULT_C10D_PORT = 29500, 29400
_JOIN_TIMEOUT_S = 900
_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


class Std(IntFlag):
    """Which of a worker's streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """``"3"``, or ``"0:1,1:3"`` by local rank.

        Raises:
            InvalidArgumentError: it is neither.
        """
        found = StreamMap.parse(vm)
        if ":" not in vm:
            return cls(found.all_others)
        return {rank: cls(streams) for rank, streams in found.of.items()}


class DefaultLogsSpecs:
    """Where the workers' output goes.

    Args:
        log_dir: the parent directory of log files; None: keep only what redirects and tee require.
        redirects, tee: streams that go only to files, and to files as well; for all workers, or by
            local rank.
        local_ranks_filter: show only the output of these local ranks.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self.root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter


@dataclass
class LaunchConfig:
    """How to launch: torch.distributed.launcher.api.LaunchConfig's fields, in its order.

    Attributes:
        min_nodes, max_nodes: the number of nodes; they may differ if `rdzv_backend` is not
            "static".
        nproc_per_node: workers on this node.
        logs_specs: a `DefaultLogsSpecs`, ours or torch's; None: the output is not redirected.
        run_id: the job's name, the same on all nodes; if empty, a random one, or "none" for several
            nodes.
        role: the role of this node's workers; nodes may have different ones.
        rdzv_endpoint: ``host:port``, for more than one node: node 0's, or the rendezvous endpoint,
            also several endpoints separated by commas.
        rdzv_backend: "static" (nodes are known by their ranks), or "c10d" or "etcd" (they come and
            go). One node needs none.
        rdzv_configs: ``rank``, this node's rank, ``timeout``, how long to wait for the others (900
            s), and, for backends other than "static", the options of --rdzv-conf.
        rdzv_timeout: the same timeout, under an older name of torch's.
        max_restarts: how many times the job may be restarted because workers failed.
        log_line_prefix_template: the prefix of teed lines, as --log-line-prefix-template.
        local_addr: the address at which others reach this node; chosen automatically if None.
        event_log_handler: "console" prints events as JSON lines; "null" does not.
        numa_options: its `affinity_mode` is --numa-binding's; None: workers are not bound.
        signals_to_handle: signals that stop the job and are forwarded to the workers.
        duplicate_stdout_filters, duplicate_stderr_filters: teed lines with one of these texts also
            go to a separate file.
        virtual_local_rank: each worker sees only one device, as device 0, and has LOCAL_RANK=0.
        shutdown_timeout: seconds for workers to end before they are killed; if None,
            TORCH_ELASTIC_SHUTDOWN_TIMEOUT's, or 30.
        local_ranks_filter: as that of `logs_specs`, which takes precedence.
        environ: what the workers inherit; the caller's own if None.
        token: the token that nodes must know to take part.
        monitor_interval, start_method, metrics_cfg: accepted for compatibility with torch and
            ignored: workers are watched, not polled, and always start as new interpreters.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None
    local_ranks_filter: set[int] | None = field(default=None, kw_only=True)
    environ: Mapping[str, str] | None = field(default=None, kw_only=True)
    token: bytes | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        self.rdzv_configs.setdefault("timeout", _JOIN_TIMEOUT_S)
        if self.shutdown_timeout is None:
            self.shutdown_timeout = float(os.environ.get(SHUTDOWN_TIMEOUT, SHUTDOWN_TIMEOUT_S))
        if self.shutdown_timeout < 0:
            raise InvalidArgumentError(
                f"shutdown_timeout={self.shutdown_timeout}; it must be 0 or more."
            )


def rendezvous_of(config: LaunchConfig) -> Rendezvous | None:
    """How nodes find each other, if they are not known from the start."""
    if config.rdzv_backend == "static" or config.max_nodes == 1:
        return None
    configuration = {key: str(value) for key, value in config.rdzv_configs.items()}
    wish = configuration.pop("rank", None)
    return Rendezvous(
        backend=config.rdzv_backend,
        endpoints=Endpoint.parse_all(config.rdzv_endpoint, DEFAULT_C10D_PORT, name="rdzv_endpoint"),
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        configuration=configuration,
        node_rank=None if wish is None else int(wish),
        local_addr=config.local_addr,
        token=config.token,
    )


def nodes_of(config: LaunchConfig) -> Nodes:
    """The other nodes."""
    if config.max_nodes > 1 and config.rdzv_backend != "static":
        return Nodes(token=config.token)
    if config.min_nodes != config.max_nodes:
        raise InvalidArgumentError(
            f"min_nodes={config.min_nodes} and max_nodes={config.max_nodes} differ: the number of"
            ' static nodes cannot change; choose rdzv_backend="c10d".'
        )
    endpoint = _endpoint(config, 0 if config.max_nodes == 1 else DEFAULT_STATIC_PORT)
    return Nodes(
        count=config.max_nodes,
        node_rank=int(config.rdzv_configs.get("rank", 0)),
        master_addr=endpoint.host or "127.0.0.1",
        master_port=endpoint.port,
        join_timeout_s=float(config.rdzv_configs["timeout"]),
        token=config.token,
    )


def logs_of(config: LaunchConfig) -> LogSpec:
    """Where the workers' output goes."""
    specs = config.logs_specs
    shown = getattr(specs, "_local_ranks_filter", None) or config.local_ranks_filter
    directory = getattr(specs, "root_log_dir", None)
    redirects, tee = (_streams(getattr(specs, name, 0)) for name in ("_redirects", "_tee"))
    if directory == os.devnull or os.path.basename(directory or "").startswith("torchelastic_"):
        directory = None  # torch always has one, and invents it if none is given
    filters = {
        STDOUT: tuple(config.duplicate_stdout_filters or ()),
        STDERR: tuple(config.duplicate_stderr_filters or ()),
    }
    template = config.log_line_prefix_template or os.environ.get(_TEMPLATE)
    return LogSpec(
        directory=directory,
        redirects=redirects,
        tee=tee,
        shown=frozenset(shown) if shown else None,
        filters=MappingProxyType({stream: texts for stream, texts in filters.items() if texts}),
        **({"tee_prefix": translate_template(template)} if template else {}),
    )


def cpus_of(config: LaunchConfig) -> tuple[frozenset[int], ...]:
    """By local rank, the CPUs that a worker may run on; empty: all."""
    if config.numa_options is None:
        return ()
    from rallypoint.cluster.affinity import bind, read_topology

    mode = getattr(config.numa_options, "affinity_mode", config.numa_options)
    topology = read_topology(os.environ if config.environ is None else config.environ)
    return bind(str(getattr(mode, "value", mode)), topology, config.nproc_per_node).cpus


def _streams(given: object) -> StreamMap:
    if isinstance(given, Mapping):
        return StreamMap(of=MappingProxyType({int(k): int(v) for k, v in given.items()}))
    return StreamMap(all_others=int(given))  # type: ignore[call-overload]


def _endpoint(config: LaunchConfig, default_port: int) -> Endpoint:
    """The static rendezvous endpoint; an empty host: only on this machine."""
    if not config.rdzv_endpoint:
        return Endpoint(host="", port=default_port)
    found = Endpoint.parse(config.rdzv_endpoint, default_port, name="rdzv_endpoint")
    if config.rdzv_backend == "static":
        return found
    # There is no other node to find: only the port of an endpoint that the launcher would open
    # matters.
    return Endpoint(host="", port=found.port if config.rdzv_backend == "c10d" else 0)
