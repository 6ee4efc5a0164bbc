"""A rendezvous that is kept in a store: any of ours that all its nodes can reach.

One of the nodes leads; when it ends, another one takes over, so nobody is needed but the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import (
    ControlMessageError,
    HostError,
    InvalidArgumentError,
    InvalidTypeError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    StoreError,
    StoreTimeoutError,
)
from rallypoint.cluster.interface import chosen_address, own_addresses
from rallypoint.cluster.network import addresses_of, can_bind, own_address
from rallypoint.rendezvous.allowed_addresses import ANY, addresses_of_members
from rallypoint.rendezvous.api.handler import RendezvousInfo, RendezvousStoreInfo
from rallypoint.rendezvous.api.node_handler import NodeHandler
from rallypoint.rendezvous.api.parameters import (
    RendezvousParameters,
    RendezvousTimeout,
    check_numbers,
    read_timeouts,
)
from rallypoint.rendezvous.api.store_node import StoreNode, StoreSeat, ring, why_closed
from rallypoint.rendezvous.api.store_state import RendezvousKeys, RendezvousState
from rallypoint.rendezvous.job.membership import Limits
from rallypoint.rendezvous.job.round import Member
from rallypoint.rendezvous.timeouts import Timeouts
from rallypoint.store.client import TCPStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.server import StoreServer
from rallypoint.store.store import Store

_FOR_EVER_S = 1e9
_LOOPBACK = "127.0.0.1"


class Named(Protocol):
    """What has a name, as torch's rendezvous backends do."""

    @property
    def name(self) -> str:
        """Its name."""


class DynamicRendezvousHandler(NodeHandler[StoreNode, StoreSeat]):
    """One node of a rendezvous that is kept in a store; made by `from_backend`."""

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Store,
        backend: Named | str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: float = 1,
        keep_alive_max_attempt: float = 5,
    ) -> DynamicRendezvousHandler:
        """Make the handler of one node.

        Args:
            run_id: the job's name; one that was used before in this store stays closed.
            store: where the nodes meet, and what holds each round's keys.
            backend: what it calls itself; it need not hold anything.
            min_nodes, max_nodes: how many nodes a round may have.
            local_addr: this node's address as others know it; None: found out.
            timeout: how long to wait for what.
            keep_alive_interval: seconds between beats.
            keep_alive_max_attempt: after so many missed beats a node counts as dead.

        Raises:
            InvalidArgumentError: there is no run id, or the numbers cannot be.
            InvalidTypeError: `store` is no store of rallypoint's.
            HostError: RALLYPOINT_SOCKET_IFNAME, or another such variable, names no interface.
            RendezvousConnectionError: the store cannot be reached.
        """
        if not run_id:
            raise InvalidArgumentError("a rendezvous needs a run id, a name for the job.")
        check_numbers(min_nodes, max_nodes)
        if keep_alive_interval <= 0 or keep_alive_max_attempt <= 0:
            raise InvalidArgumentError(
                f"keep_alive_interval is {keep_alive_interval} and keep_alive_max_attempt"
                f" {keep_alive_max_attempt}; both must be positive."
            )
        if not isinstance(store, Store):
            raise InvalidTypeError(
                f"a rendezvous meets in a store of rallypoint's, not in {type(store).__name__}; to"
                " reach PyTorch's server, use rallypoint.store.client.TCPStore."
            )
        timeout = timeout or RendezvousTimeout()
        limits = Limits(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            join_timeout_s=_FOR_EVER_S,  # each node keeps its own
            last_call_s=timeout.last_call.total_seconds(),
        )
        timeouts = Timeouts(
            beat_s=float(keep_alive_interval), missed_beats=float(keep_alive_max_attempt)
        )
        name = backend if isinstance(backend, str) else backend.name
        return cls(run_id, store, name, limits, timeout, timeouts, local_addr)

    def __init__(
        self,
        run_id: str,
        store: Store,
        backend: str,
        limits: Limits,
        timeout: RendezvousTimeout,
        timeouts: Timeouts,
        local_addr: str | None,
    ) -> None:
        super().__init__(backend, run_id, timeout)
        self._store = store
        self._limits = limits
        self._timeouts = timeouts
        self._keys = RendezvousKeys.of(run_id)
        chosen = local_addr or chosen_address(os.environ)
        address = chosen or _address_towards(store)
        self._member = Member(
            host=os.uname().nodename,
            local_world_size=1,
            address=address,
            addresses=() if is_loopback(address) else own_addresses(),
        )
        self._chosen = chosen
        self._server: StoreServer | None = None
        with self._reaching():
            self._own = store.clone()  # the program may wait with the other one

    def next_rendezvous(self) -> RendezvousInfo:
        """See RendezvousHandler."""
        with self._reaching():
            why = why_closed(self._own, self._keys)
            if why:
                raise RendezvousClosedError(f"the rendezvous {self._run_id!r} is closed: {why}")
            if self._node is not None and self._node.error is not None:
                self._node = None
            return super().next_rendezvous()

    def is_closed(self) -> bool:
        """See RendezvousHandler."""
        with self._reaching():
            return super().is_closed() or self._own.check([self._keys.closed])

    def set_closed(self) -> None:
        """See RendezvousHandler."""
        why = f"node {self._member.host} closed it"
        with self._reaching():
            self._own.compare_set(self._keys.closed, b"", why)
            ring(self._own, self._keys)

    def num_nodes_waiting(self) -> int:
        """See NodeHandler. It raises if the store was lost."""
        if self._node is not None and self._node.round >= 0:
            self._raise_if_lost(self._node)
        return super().num_nodes_waiting()

    def shutdown(self) -> bool:
        """See RendezvousHandler."""
        try:
            self.set_closed()
            is_told = True
        except RendezvousError:
            is_told = False
        if self._node is not None:
            is_told &= self._let_go(self._node)
        self._close_server()
        self._own.close()
        return is_told

    # NodeHandler.

    def _make_node(self) -> StoreNode:
        store = self._store.clone()
        return StoreNode(store, self._own, self._keys, self._member, self._limits, self._timeouts)

    def _enter(self, node: StoreNode, seat: StoreSeat, deadline: float) -> RendezvousInfo | None:
        state, rank = seat
        info = self._bootstrap(state, rank)
        if info is None:
            return None
        store = PrefixStore(self._keys.store(state.round), self._store)
        return RendezvousInfo(store, rank, len(state.members), info)

    def _raise_if_lost(self, node: StoreNode) -> None:
        if node.error is not None:
            raise self._error(node.error) from node.error

    # The store for whatever the nodes start.

    def _bootstrap(self, state: RendezvousState, rank: int) -> RendezvousStoreInfo | None:
        """Node 0's word where its store is; None if the round was over before that came."""
        store = PrefixStore(self._keys.store(state.round), self._own)
        if rank == 0:
            return RendezvousStoreInfo.build(rank, store, *self._serve(state))
        keys = [RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY]
        while not self.num_nodes_waiting():
            with suppress(StoreTimeoutError):
                store.wait(keys, timedelta(seconds=self._timeouts.beat_s))
                return RendezvousStoreInfo.build(rank, store, None)
        return None

    def _serve(self, state: RendezvousState) -> tuple[str, int]:
        """Open it, empty; the address and port to tell the others."""
        self._close_server()
        hosts = {member.host for member in state.members}
        if len(hosts) == 1 and self._chosen is None:
            self._server = StoreServer(_LOOPBACK)
            return _LOOPBACK, self._server.port
        self._server = StoreServer(ANY if self._chosen is None else _place_of(self._chosen))
        self._server.allow(addresses_of_members(state.members))
        return self._member.address, self._server.port

    def _close_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # Its own store's errors.

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn a store's errors into a rendezvous's."""
        try:
            yield
        except StoreError as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> RendezvousError:
        if isinstance(error, ControlMessageError):
            return RendezvousStateError(
                f"the rendezvous {self._run_id!r} cannot be read in its store: {error}"
            )
        return RendezvousConnectionError(
            f"the rendezvous {self._run_id!r} cannot reach its store: {error}"
        )


def create_handler(
    store: Store, backend: Named | str, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Make the handler of one node, with torch's options: join_timeout, last_call_timeout,
    close_timeout, keep_alive_interval, keep_alive_max_attempt, in seconds and beats.
    """
    interval = params.get_as_int("keep_alive_interval", 1)
    attempts = params.get_as_int("keep_alive_max_attempt", 5)
    assert interval is not None
    assert attempts is not None
    return DynamicRendezvousHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        read_timeouts(params),
        keep_alive_interval=interval,
        keep_alive_max_attempt=attempts,
    )


def _place_of(chosen: str) -> str:
    """Where to listen for those who know us by an address, or name, that was chosen."""
    with suppress(HostError):
        for address in addresses_of(chosen):
            if can_bind(address):
                return address
    return ANY  # a translated one


def _address_towards(store: Store) -> str:
    """This machine's address for those who share the store, as well as can be known."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        try:
            return own_address(store.host)
        except HostError:
            pass
    return os.uname().nodename
