"""The Ray cluster: calls to it and facts from it; nothing is decided here."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rallypoint.base.errors import HostError
from rallypoint.cli.options import is_whole
from rallypoint.cli.ray.channel import Channel, Shell, first_line
from rallypoint.cli.ray.placement import AgentRequest, Need, RayFacts, RayNode

ADDRESS = "RAY_ADDRESS"
_ANSWER_S = 10.0  # for the server at an address; Ray itself would try for minutes
_HOW = (
    "run this on one of its nodes, or have Ray run it there: ray job submit --address"
    " http://HEAD:8265 --working-dir . -- rallypoint run --on ray ..."
)


class Cluster:
    """A connection to the cluster; what runs there for us ends with this connection, or with this
    process.
    """

    def __init__(self) -> None:
        self._ray = _import_ray()
        address = os.environ.get(ADDRESS, "")
        if address not in ("", "auto"):
            _check(address)
        try:
            self._ray.init(address or "auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError:
            raise HostError(
                f"--on ray: there is no Ray cluster here, and {ADDRESS} names none; {_HOW}"
            ) from None
        except (RuntimeError, ValueError) as error:
            raise HostError(f"--on ray: Ray refused the connection: {first_line(error)}") from None
        self._group: Any = None

    def close(self) -> None:
        """End what is left of our actors, and the connection."""
        self._ray.shutdown()

    def nodes(self) -> list[RayNode]:
        """The nodes that Ray reports as alive."""
        return [
            RayNode(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def ask_for_group(self, need: Need, count: int) -> None:
        """Request that many nodes at once; `facts` shows when they are available."""
        from ray.util.placement_group import placement_group

        # Ray refuses a bundle that reserves nothing.
        bundle = need.resources or {"CPU": 0.001}
        self._group = placement_group([bundle] * count, strategy="STRICT_SPREAD")

    def facts(self) -> RayFacts | None:
        """The facts as of now; waits for Ray. None if Ray's control service does not answer."""
        from ray.util.placement_group import placement_group_table

        try:
            table, nodes = placement_group_table(self._group), self.nodes()
        except (self._ray.exceptions.RayError, RuntimeError, OSError):
            return None
        bundles = {int(at): node_id for at, node_id in table["bundles_to_node_id"].items()}
        return RayFacts(nodes, bundles)

    def start_actor(
        self, request: AgentRequest, need: Need, tell: Callable[[Future[str]], None]
    ) -> Any:
        """Request a Shell on that node; returns Ray's handle of it.

        Args:
            tell: called in a thread of Ray's, with the Shell's directory once it runs, or with the
                reason why it never will.
        """
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        strategy: object
        if request.bundle is None:
            strategy = NodeAffinitySchedulingStrategy(request.node.node_id, soft=False)
        else:
            strategy = PlacementGroupSchedulingStrategy(self._group, request.bundle)
        shell = self._ray.remote(concurrency_groups={"orders": 1, "output": 1})(Shell)
        actor = shell.options(
            num_cpus=need.cpus, num_gpus=need.gpus, max_restarts=0, scheduling_strategy=strategy
        ).remote()
        actor.look.remote().future().add_done_callback(tell)
        return actor

    def why_hopeless(self, error: BaseException) -> str:
        """The reason why no actor can ever run there; empty if only its node, or only this actor,
        was lost.
        """
        errors = self._ray.exceptions
        if "No module named 'rallypoint" in str(error):
            return "install Rallypoint there as well, for the Python that runs Ray"
        if isinstance(error, errors.ActorUnschedulableError | errors.NodeDiedError):
            return ""
        if isinstance(error, errors.ActorDiedError | errors.ActorUnavailableError):
            return ""
        return first_line(error)

    def channel(self, actor: Any, module: str) -> Channel:
        """A connection to that module, which runs on the actor's node."""
        return Channel(actor, self._ray, module)

    def end_actor(self, actor: Any) -> None:
        """End an actor, whether it is running yet or not."""
        self._ray.kill(actor)

    def working_dir(self) -> str:
        """The working directory of the Ray job that runs this, as Ray names its copies; empty if it
        has none.
        """
        return str(self._ray.get_runtime_context().runtime_env.get("working_dir") or "")


def _check(address: str) -> None:
    """Refuse an address of another kind, or one where no server listens."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not is_whole(port):
        raise HostError(
            f"--on ray: {ADDRESS} is {address}, not HOST:PORT as nodes of the cluster use it;"
            f" {_HOW}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        raise HostError(
            f"--on ray: no Ray cluster answers at {ADDRESS}={address} ({error.strerror or error});"
            f" check the address, or {_HOW}"
        ) from None


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise HostError(
            f"--on ray needs Ray ({error}); install it on all nodes: pip install 'rallypoint[ray]'"
        ) from None
    return ray


def directory_on_node(mine: str, theirs: str, working_dir: str) -> str:
    """The directory in which to work on a node.

    Args:
        mine: this process's directory.
        theirs: the directory of an actor on that node.
        working_dir: see Cluster.working_dir.

    If Ray has a working directory, whose copies may be anywhere, the directory below the copy that
    corresponds to `mine`; otherwise the same path.
    """
    copy = os.path.basename(working_dir).removesuffix(".zip")
    _, found, below = f"{mine}/".partition(f"/{copy}/")
    if not copy or not found:
        return mine
    return os.path.join(theirs, below).rstrip("/")
