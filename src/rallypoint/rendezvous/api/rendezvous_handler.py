"""The interface of every rendezvous, for Python programs: torch.distributed.elastic's; and its
backends by name: those registered here, and those that packages provide.

A program that calls it is one node, whatever it does there: `next_rendezvous` is the barrier before
each round, and `num_nodes_waiting` says when to return to it.

A package provides a backend with an entry point of the group ``rallypoint.rendezvous``, named as
the backend: a function from RendezvousParameters to a RendezvousHandler. This package's own are
entry points too. Plug-ins for torchrun (``torchrun.handlers``: a function that returns such a
function) are found as well. Only the requested one is loaded.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from rallypoint.base.errors import InvalidArgumentError, RendezvousError
from rallypoint.base.port_range import bind_free
from rallypoint.rendezvous.timeouts import read_bool
from rallypoint.store.store import Store

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class RendezvousParameters:
    """The parameters of a rendezvous.

    Args:
        backend: the name of a registered rendezvous.
        endpoint: the rendezvous endpoint; usually ``"host:port"``.
        run_id: the job's name.
        min_nodes, max_nodes: how many nodes a round may have.
        local_addr: the address at which others reach this node; None: chosen automatically.
        config: options of the backend, as in --rdzv-conf.

    Raises:
        InvalidArgumentError: there is no backend, or the numbers are impossible.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **config: Any,  # noqa: ANN401 - as torch's
    ) -> None:
        if not backend:
            raise InvalidArgumentError("a rendezvous needs the name of a backend, such as 'c10d'.")
        check_numbers(min_nodes, max_nodes)
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config: dict[str, Any] = config

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - as torch's
        """Return an option, or `default` if it is not given."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return a boolean option: a bool, 1, 0, "true", "f", "yes", "n", ...

        Raises:
            InvalidArgumentError: it has another value.
        """
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        found = read_bool(str(value)) if isinstance(value, int | str) else None
        if found is None:
            raise InvalidArgumentError(
                f"the rendezvous option {key} is {value!r}; it must be true or false."
            )
        return found

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return an integer option.

        Raises:
            InvalidArgumentError: it has another value.
        """
        value = self.get(key, default)
        try:
            return None if value is None else int(value)
        except ValueError:
            raise InvalidArgumentError(
                f"the rendezvous option {key} is {value!r}; it must be an integer."
            ) from None


class RendezvousTimeout:
    """How long the parts of a rendezvous may take; None means the default.

    Attributes:
        join: until a round begins; 600 s.
        last_call: for latecomers, once the minimum of nodes has joined; 3 s.
        close: to notify the others that it is closed; 30 s.
        heartbeat: accepted for compatibility with torch and ignored: operations use the store's
            timeout.

    Raises:
        InvalidArgumentError: one is not positive.
    """

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self.join = _positive("join", join, 600)
        self.last_call = _positive("last_call", last_call, 3)
        self.close = _positive("close", close, 30)
        self.heartbeat = _positive("heartbeat", heartbeat, 5)


def _positive(name: str, given: timedelta | None, default_s: int) -> timedelta:
    timeout = timedelta(seconds=default_s) if given is None else given
    if timeout <= timedelta(0):
        raise InvalidArgumentError(f"the {name} timeout is {timeout}; it must be positive.")
    return timeout


def read_timeouts(parameters: RendezvousParameters) -> RendezvousTimeout:
    """join_timeout, last_call_timeout, close_timeout and heartbeat_timeout, in seconds."""
    found: dict[str, Any] = {}
    for name in ("join", "last_call", "close", "heartbeat"):
        seconds = parameters.get_as_int(f"{name}_timeout")
        found[name] = None if seconds is None else timedelta(seconds=seconds)
    return RendezvousTimeout(**found)


def check_numbers(min_nodes: int, max_nodes: int) -> None:
    """Check numbers of nodes."""
    if min_nodes < 1:
        raise InvalidArgumentError(f"min_nodes is {min_nodes}; a round needs at least one node.")
    if max_nodes < min_nodes:
        raise InvalidArgumentError(
            f"max_nodes is {max_nodes}, less than min_nodes ({min_nodes}); it must be at least "
            "that."
        )


@dataclass(frozen=True, slots=True)
class RendezvousStoreInfo:
    """Where the processes of a round find the store to connect through.

    Attributes:
        master_addr, master_port: for MASTER_ADDR and MASTER_PORT.
    """

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: Store, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Node 0 sends the others its address, and a port: a free one if none is given.

        Raises:
            StoreTimeoutError: node 0 did not send it within the store's timeout.
        """
        keys = [RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY]
        if rank == 0:
            port = server_port or _free_port()
            store.multi_set(keys, [local_addr or os.uname().nodename, str(port)])
        address, number = store.multi_get(keys)
        return RendezvousStoreInfo(address.decode(), int(number))


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """A node's place in a round.

    Attributes:
        store: shared by the round's nodes, and empty when the round begins.
        rank: this node's.
        world_size: the number of nodes.
        bootstrap_store_info: of a store for processes that the nodes start, if there is one.
    """

    store: Store
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo | None = None


class RendezvousHandler(ABC):
    """One node's part in a rendezvous."""

    @abstractmethod
    def get_backend(self) -> str:
        """Return the name under which it is registered."""

    @property
    def use_agent_store(self) -> bool:
        """Whether the store of `bootstrap_store_info` is already served by this rendezvous."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until a round begins in which this node takes part.

        This call also leaves the node's current round; the next one begins when all remaining nodes
        of that round have called it. A spare node, for which the round has no room, waits without
        limit.

        Raises:
            RendezvousClosedError: there is no further round.
            RendezvousGracefulExitError: the same, for a spare node that never had a place.
            RendezvousTimeoutError: no round began in time; this node no longer waits.
            RendezvousConnectionError: the rendezvous backend cannot be reached.
            RendezvousStateError: the backend holds an invalid value.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether there is no further round, as far as this node knows.

        It takes a moment until all nodes know.
        """

    @abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous: no further round begins."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """The number of nodes that wait for the next round; if it is not 0, call `next_rendezvous`.

        Nodes for which there is no room do not count.
        """

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the job's name, by which its nodes know each other."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Close the rendezvous and free its resources; returns whether the others will know."""


def _free_port() -> int:
    with bind_free(lambda port: socket.create_server(("", port))) as listener:
        return int(listener.getsockname()[1])


# The backends.

GROUP, TORCH_GROUP = "rallypoint.rendezvous", "torchrun.handlers"
_OWN = "rallypoint"  # the distribution's name

RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Backends by name."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register `creator` as `backend`; it takes precedence over a package's.

        Raises:
            InvalidArgumentError: the name is empty, or another creator has it.
        """
        if not backend:
            raise InvalidArgumentError("a rendezvous backend needs a name.")
        if self._creators.get(backend, creator) != creator:
            raise InvalidArgumentError(
                f"the rendezvous backend {backend!r} is already registered, with"
                f" {self._creators[backend]!r}; choose another name."
            )
        self._creators[backend] = creator

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Create a handler of the backend that `params` names.

        Raises:
            InvalidArgumentError: there is no such backend.
            RendezvousError: its plug-in cannot be loaded, or creates another one.
        """
        creator = self._creators.get(params.backend) or find_plug_in(params.backend)
        if creator is None:
            raise InvalidArgumentError(
                f"there is no rendezvous backend {params.backend!r}; known backends: "
                f"{', '.join(self.names())}; register it, or install its package."
            )
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RendezvousError(
                f"the rendezvous backend {params.backend!r} created a handler whose get_backend() "
                f"returns {handler.get_backend()!r}; report this to its author."
            )
        return handler

    def names(self) -> list[str]:
        """The names of all backends."""
        return sorted({*self._creators, *plug_ins()})


def plug_ins() -> dict[str, EntryPoint]:
    """The backends of packages, by name; they cannot use this package's own names."""
    from importlib.metadata import entry_points  # most programs never need it

    found = {each.name: each for each in entry_points(group=TORCH_GROUP)}
    own = sorted(entry_points(group=GROUP), key=lambda each: _brought_by(each) == _OWN)
    found.update((each.name, each) for each in own)  # the last one takes precedence
    return found


def find_plug_in(name: str) -> RendezvousHandlerCreator | None:
    """The creator that a package provides under that name."""
    entry = plug_ins().get(name)
    if entry is None:
        return None
    try:
        loaded = entry.load()
        creator: RendezvousHandlerCreator = loaded() if entry.group == TORCH_GROUP else loaded
    except Exception as error:
        raise RendezvousError(
            f"the rendezvous backend {name!r}, which {_brought_by(entry)} brings as {entry.value},"
            f" cannot be loaded: {error}; repair or remove that package."
        ) from error
    return creator


def _brought_by(entry: EntryPoint) -> str:
    return "a package" if entry.dist is None else entry.dist.name


rendezvous_handler_registry = RendezvousHandlerRegistry()
register = rendezvous_handler_registry.register


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler of the backend that `params` names; see `create_handler`."""
    return rendezvous_handler_registry.create_handler(params)
