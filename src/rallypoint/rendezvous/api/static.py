"""For Python programs: nodes known by their ranks, where node 0 serves the store at the endpoint.

The n-th round begins when every rank has joined for the n-th time, even if its process was
restarted in between. Its store is a part of the endpoint's store that no other round uses.
"""

from __future__ import annotations

from datetime import timedelta

from rallypoint.base.errors import (
    InvalidArgumentError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    StoreError,
    StoreTimeoutError,
)
from rallypoint.rendezvous.api.rendezvous_handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from rallypoint.rendezvous.job.gathering import shorten
from rallypoint.rendezvous.job.round import Endpoint
from rallypoint.store.client import TCPStore
from rallypoint.store.prefix import PrefixStore


class StaticTCPRendezvous(RendezvousHandler):
    """A rendezvous of exactly `world_size` nodes.

    Args:
        master_addr, master_port: where node 0 serves the store; port 0 takes any free one, which
            only works for a single node.
        rank: this node's.
        timeout: how long to wait for the others, in seconds.

    Raises:
        InvalidArgumentError: the rank is impossible.
    """

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        world_size: int,
        run_id: str,
        timeout: float,
    ) -> None:
        if not 0 <= rank < world_size:
            raise InvalidArgumentError(
                f"the node's rank is {rank}; with {world_size} nodes it must be from 0 to"
                f" {world_size - 1}."
            )
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timedelta(seconds=timeout)
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            return self._meet(self._open())
        except StoreError as error:
            raise RendezvousConnectionError(
                f"the rendezvous {self.run_id!r} lost its store: {error}"
            ) from error

    def is_closed(self) -> bool:
        try:
            return self._store is not None and self._store.check([self._key("closed")])
        except StoreError:
            return True  # node 0 has ended, and nothing can begin without it

    def set_closed(self) -> None:
        if self._store is not None:
            self._store.set(self._key("closed"), str(self.rank))

    def num_nodes_waiting(self) -> int:
        """See RendezvousHandler. All nodes are known, so no others join."""
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        """See RendezvousHandler. The store ends with node 0's."""
        store, self._store = self._store, None
        if store is None:
            return True
        try:
            store.set(self._key("closed"), str(self.rank))
            store.check([])  # it has arrived
        except StoreError:
            return False
        finally:
            store.close()
        return True

    def _open(self) -> TCPStore:
        if self._store is None:
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                is_master=self.rank == 0,
                timeout=self.timeout,
                multi_tenant=True,
            )
        return self._store

    def _meet(self, store: TCPStore) -> RendezvousInfo:
        if store.check([self._key("closed")]):
            raise RendezvousClosedError(f"the rendezvous {self.run_id!r} is closed.")
        number = store.add(self._key(f"times/{self.rank}"), 1)
        keys = [self._key(f"{number}/{rank}") for rank in range(self.world_size)]
        store.set(keys[self.rank], "here")
        try:
            store.wait(keys, self.timeout)
        except StoreTimeoutError:
            absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise RendezvousTimeoutError(
                f"{self.world_size - len(absent)}/{self.world_size} nodes joined"
                f" {self.run_id!r} within {self.timeout.total_seconds():g} s; missing rank"
                f" {shorten(absent)}: start it there, or find out why it exited."
            ) from None
        return RendezvousInfo(
            PrefixStore(self._key(f"{number}/store"), store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, store.port),
        )

    def _key(self, name: str) -> str:
        return f"rallypoint.rendezvous/{self.run_id}/{name}"


def create_handler(params: RendezvousParameters) -> StaticTCPRendezvous:
    """Create a handler; the option ``rank`` is this node's, ``timeout`` how long to wait, in
    seconds.
    """
    rank = params.get_as_int("rank")
    if rank is None:
        raise InvalidArgumentError("a static rendezvous needs this node's rank: give --node-rank.")
    if not params.endpoint.strip():
        raise InvalidArgumentError(
            "a static rendezvous needs an endpoint: give --master-addr and --master-port."
        )
    endpoint = Endpoint.parse(params.endpoint, None, name="the rendezvous endpoint")
    timeout_s = params.get_as_int("timeout", 600)
    assert timeout_s is not None
    return StaticTCPRendezvous(
        endpoint.host, endpoint.port, rank, params.max_nodes, params.run_id, timeout_s
    )
