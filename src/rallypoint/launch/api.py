"""Launching from Python: `elastic_launch` and `LaunchConfig`, with torch's names.

The caller's process becomes the agent for as long as the call takes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rallypoint.base.errors import InvalidArgumentError, WorkersFailedError
from rallypoint.launch.agent import run
from rallypoint.launch.call import read_result, write_call
from rallypoint.launch.job import Job, Nodes, Rendezvous
from rallypoint.rendezvous.round import Endpoint

DEFAULT_STATIC_PORT, DEFAULT_C10D_PORT = 29500, 29400


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How to launch; field names are torch's.

    Attributes:
        min_nodes, max_nodes: how many nodes; they may differ if `rdzv_backend` is not "static".
        nproc_per_node: workers on this node.
        run_id: the job's name, the same on all nodes.
        role: what this node's workers do; several nodes may have different ones.
        rdzv_endpoint: ``host:port``, for more than one node: node 0's, or where nodes meet.
        rdzv_backend: "static" (nodes are known by their ranks), or "c10d" or "etcd" (they come and
            go).
        rdzv_configs: ``rank``, this node's rank, ``timeout``, how long to wait for the others, and
            with the others what --rdzv-conf takes.
        local_addr: this node's address as others know it; found out if None.
        max_restarts: how many new rounds the job may take because workers failed.
        shutdown_timeout: seconds from asking workers to end until they are killed.
        environ: what the workers inherit; the caller's own if None.
        monitor_interval, start_method: accepted for torch's sake; workers are watched, not polled,
            and always start as new interpreters.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    run_id: str = "none"
    role: str = "default"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "static"
    rdzv_configs: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    shutdown_timeout: float = 30.0
    environ: Mapping[str, str] | None = None
    local_addr: str | None = None
    token: bytes | None = None

    def rendezvous(self) -> Rendezvous | None:
        """How nodes find each other, if they are not known from the start.

        Raises:
            InvalidArgumentError: numbers or endpoint that cannot be.
        """
        if self.rdzv_backend == "static" or self.max_nodes == 1:
            return None
        configuration = {key: str(value) for key, value in self.rdzv_configs.items()}
        wish = configuration.pop("rank", None)
        host, port = self._endpoint(DEFAULT_C10D_PORT)
        return Rendezvous(
            backend=self.rdzv_backend,
            endpoints=(Endpoint(host=host, port=port),) if host else (),
            run_id=self.run_id,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            configuration=configuration,
            node_rank=None if wish is None else int(wish),
            local_addr=self.local_addr,
            token=self.token,
        )

    def _endpoint(self, default_port: int) -> tuple[str, int]:
        host, colon, port = self.rdzv_endpoint.rpartition(":")
        if not colon or port.endswith("]"):
            host, port = self.rdzv_endpoint, str(default_port)
        if self.rdzv_endpoint and not (host and port.isdigit()):
            raise InvalidArgumentError(
                f"rdzv_endpoint={self.rdzv_endpoint!r} must be host:port, node 0's."
            )
        return host.strip("[]"), int(port)

    def nodes(self) -> Nodes:
        """With which other nodes.

        Raises:
            InvalidArgumentError: numbers or endpoint that cannot be.
        """
        if self.rendezvous() is not None:
            return Nodes(token=self.token)
        if self.min_nodes != self.max_nodes:
            raise InvalidArgumentError(
                f"min_nodes={self.min_nodes} and max_nodes={self.max_nodes} differ: the number of"
                ' static nodes cannot change; choose rdzv_backend="c10d".'
            )
        host, port = self._endpoint(0 if self.max_nodes == 1 else DEFAULT_STATIC_PORT)
        return Nodes(
            count=self.max_nodes,
            node_rank=int(self.rdzv_configs.get("rank", 0)),
            master_addr=host or "127.0.0.1",
            master_port=port,
            join_timeout_s=float(self.rdzv_configs.get("timeout", 600.0)),
            token=self.token,
        )


class elastic_launch:  # noqa: N801 - torch's name
    """Run a function, or a program, in the workers of a job: ``elastic_launch(config, f)(*args)``.

    Calling it returns what each of this node's workers returned, by global rank; for a program,
    which returns nothing, the values are None.

    Raises:
        WorkersFailedError: the job failed; its `failures` hold what this node's workers raised.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: object) -> dict[int, Any]:
        """Launch, and wait for the end."""
        with tempfile.TemporaryDirectory(prefix="rallypoint_call_") as directory:
            path = f"{directory}/call"
            if isinstance(self._entrypoint, str):
                command = (self._entrypoint, *map(str, args))
            else:
                write_call(path, self._entrypoint, args, with_number=False)
                command = (sys.executable, "-u", "-m", "rallypoint.launch.call", path)
            config = self._config
            status = run(
                Job(
                    command=command,
                    local_world_size=config.nproc_per_node,
                    role=config.role,
                    max_restarts=config.max_restarts,
                    run_id=config.run_id,
                    host=os.uname().nodename,
                    environ=dict(os.environ if config.environ is None else config.environ),
                    nodes=config.nodes(),
                    rendezvous=config.rendezvous(),
                    shutdown_timeout_s=config.shutdown_timeout,
                )
            )
            names = [name.removeprefix("call.") for name in os.listdir(directory)]
            found = {int(name): read_result(path, int(name)) for name in names if name.isdigit()}
        if status:
            failures = {rank: result[2] for rank, result in found.items() if result and result[2]}
            raise WorkersFailedError(
                f"the job ended with status {status}; the launcher's summary on stderr tells why",
                status=status,
                failures=failures,
            )
        if isinstance(self._entrypoint, str):
            return dict.fromkeys(range(config.nproc_per_node))
        return {rank: result[0] for rank, result in sorted(found.items()) if result}
