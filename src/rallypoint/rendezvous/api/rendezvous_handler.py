"""The interface of every rendezvous, for Python programs: torch.distributed.elastic's.

A program that calls it is one node, whatever it does there: `next_rendezvous` is the barrier before
each round, and `num_nodes_waiting` says when to return to it.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from rallypoint.base.port_range import bind_free
from rallypoint.store.store import Store


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
