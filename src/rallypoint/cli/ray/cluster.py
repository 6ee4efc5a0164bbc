"""The Ray cluster: calls to it, facts from it, and both ends of an actor; nothing is decided here.

The starter's end of an actor has the `HostStreams` of remote_node.py, which Shell starts.

    link --> stdin  --thread--> Shell.write          one call after the other, so in order
    link <-- stdout, stderr <--thread-- Shell.read   the next one when these were taken

Two threads wait for Ray, so that nothing else has to. They end with the actor, or with the link.
When the actor ends, however it ends, remote_node.py reaches the end of its input and ends its
launcher. Ray does not end an actor whose raylet was killed, so this one ends itself then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import IO, Any

from rallypoint.base.errors import HostError
from rallypoint.base.process_end import ProcessEnd
from rallypoint.cli.options import is_whole
from rallypoint.cli.ray.placement import AgentRequest, Need, RayFacts, RayNode
from rallypoint.cli.remote.host_connection import HostStreams

ADDRESS = "RAY_ADDRESS"
_ANSWER_S = 10.0  # for the server at an address; Ray itself would try for minutes
_HOW = (
    "run this on one of its nodes, or have Ray run it there: ray job submit --address"
    " http://HEAD:8265 --working-dir . -- rallypoint run --on ray ..."
)
_READ_BYTES = 64 << 10  # small enough that Ray sends it within a reply
_THREADS = "OMP_NUM_THREADS"
_RAYLET = "RAY_RAYLET_PID"
_DEBUGGER = "PYTHONBREAKPOINT"


class Cluster:
    """A connection to the cluster; what runs there for us ends with it, or with this process."""

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
        """Why no actor can ever run there; empty if only its node, or only this actor, was lost."""
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
        """The working directory of the Ray job that runs this, as Ray names its copies, if any."""
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
            f"--on ray needs Ray ({error}); install it on all nodes: pip install ray"
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


# An actor.


class Channel(HostStreams):
    """Leads to an actor's node. `actor` is Ray's handle of a running Shell, to run `module`."""

    def __init__(self, actor: Any, ray: Any, module: str) -> None:
        self._actor = actor
        self._ray = ray
        orders, self.stdin = os.pipe()
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        self.ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False
        self._lost = ""  # the reason why the actor cannot be reached
        self._started = self._call("orders", "start", module)
        self.threads = (
            threading.Thread(target=self._carry_orders, args=(orders,), daemon=True),
            threading.Thread(target=self._carry_output, args=(out, err), daemon=True),
        )
        for thread in self.threads:
            thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether the actor ended, rather than the program that it runs."""
        return bool(self._lost)

    def end(self) -> None:
        self._ray.kill(self._actor)
        self._has_ended()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.ended)
        self._ray.kill(self._actor)

    def why(self, said: str) -> str:
        if "No module named" in said:
            return "install Rallypoint there as well, for the Python that runs Ray"
        return self._lost or "the program there exited before it answered"

    def _carry_orders(self, orders: int) -> None:
        try:
            self._ray.get(self._started)
            while data := os.read(orders, _READ_BYTES):
                self._ray.get(self._call("orders", "write", data))
            self._ray.get(self._call("orders", "end_input"))
        except self._ray.exceptions.RayError:
            pass  # the other thread reports it
        finally:
            os.close(orders)

    def _carry_output(self, out: int, err: int) -> None:
        try:
            self._ray.get(self._started)
            while any(found := self._ray.get(self._call("output", "read"))):
                for fd, data in zip((out, err), found, strict=True):
                    _write(fd, data)
        except self._ray.exceptions.RayError as error:
            self._lost = first_line(error)
        except BrokenPipeError:
            pass  # the link is closed
        finally:
            os.close(out)
            os.close(err)
            self._has_ended()

    def _call(self, group: str, method: str, *arguments: object) -> Any:
        return getattr(self._actor, method).options(concurrency_group=group).remote(*arguments)

    def _has_ended(self) -> None:
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self.ended, 1)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def first_line(error: BaseException) -> str:
    """The first line of Ray's message, which may be a page long, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")


class Shell:
    """The actor: a program on its node, and the program's three streams.

    Ray calls its methods; `read` blocks, so it and the orders each need their own thread.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._poll = select.poll()
        self._raylet: ProcessEnd | None = None
        # By descriptor, what is read: 0 is stdout, 1 is stderr.
        self._open: dict[int, tuple[int, IO[bytes]]] = {}

    def look(self) -> str:
        """The working directory that Ray gave this actor."""
        return os.getcwd()

    def start(self, module: str) -> None:
        """Start that module of ours as a program."""
        with open("/proc/self/environ", "rb") as file:
            given = {os.fsdecode(word.partition(b"=")[0]) for word in file.read().split(b"\0")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=without_ray(os.environ, given),
            bufsize=0,
            start_new_session=True,
        )
        for number, stream in enumerate((self._process.stdout, self._process.stderr)):
            assert stream is not None
            self._open[stream.fileno()] = (number, stream)
            self._poll.register(stream.fileno(), select.POLLIN)
        with contextlib.suppress(OSError, ValueError):  # the raylet is not visible from a container
            self._raylet = ProcessEnd(int(os.environ.get(_RAYLET, "")))
            self._poll.register(self._raylet, select.POLLIN)

    def write(self, data: bytes) -> None:
        """Write all of this to the program's input."""
        while data:
            data = data[os.write(self._stdin.fileno(), data) :]

    def end_input(self) -> None:
        """Close the program's input; it then ends by itself."""
        self._stdin.close()

    def read(self) -> tuple[bytes, bytes]:
        """The program's output on stdout and stderr; waits for some. Both empty: it has ended."""
        found = [b"", b""]
        while self._open and not any(found):
            for fd, _ in self._poll.poll():
                if self._raylet is not None and fd == self._raylet.fileno():
                    os._exit(1)
                data = os.read(fd, _READ_BYTES)
                number, stream = self._open[fd]
                found[number] = data
                if not data:
                    self._poll.unregister(fd)
                    del self._open[fd]
                    stream.close()
        if not any(found) and self._process is not None:
            self._process.wait()
        return found[0], found[1]

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin


def without_ray(environ: Mapping[str, str], given: set[str]) -> dict[str, str]:
    """The environment without what Ray has set: `given` is what the process was started with."""
    kept = dict(environ)
    if _THREADS not in given:  # Ray derives it from the actor's CPUs, which all workers share
        kept.pop(_THREADS, None)
    if kept.get(_DEBUGGER, "").startswith("ray."):
        del kept[_DEBUGGER]
    return kept
