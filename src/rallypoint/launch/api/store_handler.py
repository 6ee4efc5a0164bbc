"""A rendezvous that is kept in a store: any of ours that all its nodes can reach.

Its nodes are agents like those of c10d and etcd (program_node.py), with the store as the keeper of
their agreements; they reach each other at their own ports. Only the store is required. Under
rallypoint.rendezvous/<run id>/ are

    state           the agents' keys, as one value (rendezvous/keyvalue/), and why it is closed
    token           what nodes prove to each other: anyone who can reach the store can take part
    <n>/store/...   what the program stores in round n
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Protocol

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import (
    ControlMessageError,
    InvalidArgumentError,
    InvalidTypeError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    StoreError,
)
from rallypoint.cluster.interface_choice import NetworkChoice
from rallypoint.cluster.network import choose_network, own_addresses
from rallypoint.launch.api.program_node import NodeHandler, ProgramNode
from rallypoint.launch.rounds.elastic import ElasticRounds
from rallypoint.launch.rounds.linked import lease_time
from rallypoint.launch.rounds.store_host import listen, listening_address
from rallypoint.rendezvous.api.rendezvous_handler import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeout,
    check_numbers,
    read_timeouts,
)
from rallypoint.rendezvous.consensus.messages import Setup
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.round import Member, Seat
from rallypoint.rendezvous.keyvalue.keeper import JobKeys, Transact
from rallypoint.rendezvous.keyvalue.key_value_link import KeyValueLink
from rallypoint.rendezvous.keyvalue.key_value_register import StoreRules
from rallypoint.rendezvous.keyvalue.store_client import StoreClient
from rallypoint.rendezvous.timeouts import Timeouts
from rallypoint.store.client import TCPStore
from rallypoint.store.local_store import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.store import Store

_FOR_EVER_S = 1e9
_LOOPBACK = "127.0.0.1"
_numbers = count()


class StoreNode(ProgramNode):
    """A node whose job ends only when it is closed. Otherwise rounds would be numbered from 0
    again, and the store still holds programs' keys of the rounds with those numbers.
    """

    def withdraw(self) -> None:
        self.end()


class Named(Protocol):
    """An object with a name, as torch's rendezvous backends are."""

    @property
    def name(self) -> str:
        """Its name."""


class DynamicRendezvousHandler(NodeHandler):
    """One node of a rendezvous that is kept in a store; created by `from_backend`."""

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
        """Create the handler of one node.

        Args:
            run_id: the job's name; a name whose rendezvous was closed in this store stays closed.
            store: the store of the rendezvous, which also holds each round's keys.
            backend: only its name is used.
            min_nodes, max_nodes: how many nodes a round may have.
            local_addr: this node's address, at which the others reach it; None: chosen
                automatically.
            timeout: the timeouts.
            keep_alive_interval: seconds between heartbeats.
            keep_alive_max_attempt: after this many missed heartbeats a node counts as dead.

        Raises:
            InvalidArgumentError: there is no run id, or numbers are impossible.
            InvalidTypeError: `store` is not a store of rallypoint.
            HostError: `local_addr` cannot be resolved, there is no route to the store's host, or
                RALLYPOINT_SOCKET_IFNAME or a similar variable names no interface.
            RendezvousConnectionError: the store cannot be reached.
        """
        if not run_id:
            raise InvalidArgumentError("a rendezvous needs a run id, which names the job.")
        check_numbers(min_nodes, max_nodes)
        if keep_alive_interval <= 0 or keep_alive_max_attempt <= 0:
            raise InvalidArgumentError(
                f"keep_alive_interval is {keep_alive_interval} and keep_alive_max_attempt"
                f" {keep_alive_max_attempt}; both must be positive."
            )
        if not isinstance(store, Store):
            raise InvalidTypeError(
                f"a rendezvous needs a store of rallypoint, not a {type(store).__name__}; to use "
                "PyTorch's server, connect with rallypoint.store.client.TCPStore."
            )
        timeout = timeout or RendezvousTimeout()
        limits = Limits(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            join_timeout_s=_FOR_EVER_S,  # each handler limits its own waits
            last_call_s=timeout.last_call.total_seconds(),
        )
        timeouts = Timeouts(
            join_timeout_s=_FOR_EVER_S,
            heartbeat_s=float(keep_alive_interval),
            missed_heartbeats=float(keep_alive_max_attempt),
            outage_s=0.0,  # a node that has lost the store has lost the rendezvous
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
        choice = _choose(store, local_addr)
        self._address = choice.address
        is_chosen = choice.is_wished and choice.is_own
        self._place = listening_address(self._address, is_chosen=is_chosen)
        self._root = f"rallypoint.rendezvous/{run_id}"
        self._closed = JobKeys(run_id, 0).closed
        with self._reaching():
            self._own = store.clone()  # the program may wait with the other one
            self._value = StoreClient(self._own, f"{self._root}/state")
            token = os.urandom(16).hex()
            self._token = self._own.compare_set(f"{self._root}/token", b"", token)

    def next_rendezvous(self) -> RendezvousInfo:
        with self._reaching():
            why = self._why_closed()
        if why:
            raise RendezvousClosedError(f"the rendezvous {self._run_id!r} is closed: {why}")
        node = self._node
        if node is not None and (node.error or node.finish):
            self._node = None  # it comes back as a different node
        with self._reaching():
            return super().next_rendezvous()

    def is_closed(self) -> bool:
        with self._reaching():
            return super().is_closed() or bool(self._why_closed())

    def set_closed(self) -> None:
        why = f"node {os.uname().nodename} closed it"
        with self._reaching():
            self._value.transact(
                Transact(revisions={self._closed: 0}, puts={self._closed: why.encode()})
            )
        if self._node is not None:
            self._node.close()  # sooner than with the next heartbeat

    def num_nodes_waiting(self) -> int:
        """See NodeHandler. It raises if the store was lost."""
        node = self._node
        if node is not None and node.round >= 0 and node.error is not None:
            raise self._error(node.error) from node.error
        return super().num_nodes_waiting()

    def shutdown(self) -> bool:
        try:
            self.set_closed()
            is_told = True
        except RendezvousError:
            is_told = False
        node, self._node = self._node, None
        if node is not None:
            node.end()
            is_told &= node.join(self._close_s)
        self._own.close()
        return is_told

    # NodeHandler.

    def _make_node(self) -> StoreNode:
        client = StoreClient(self._store.clone(), f"{self._root}/state")
        listener = listen(self._place, 0)
        host = os.uname().nodename
        me = Member(
            # Nodes of one host get their ranks in the order of their creation.
            key=f"{os.getpid():08x}{next(_numbers):08x}{os.urandom(8).hex()}",
            host=host,
            local_world_size=1,
            address=self._address,
            addresses=() if is_loopback(self._address) else own_addresses(),
            port=listener.getsockname()[1],
        )
        setup = Setup(
            me=me, run_id=self._run_id, limits=self._limits, endpoints=(), timeouts=self._timeouts
        )
        rounds = ElasticRounds(
            setup,
            listener,
            self._token,
            keeper=KeyValueLink(setup, client, lease_time, StoreRules, is_needed=True),
            store_address=self._place,
            speak=_keep_silent,
        )
        return StoreNode(rounds, host)

    def _enter(self, node: ProgramNode, seat: Seat, deadline: float) -> RendezvousInfo | None:
        del node, deadline
        prefix = f"{self._root}/{seat.number}/store"
        address = RendezvousStoreInfo(seat.store.host, seat.store.port)
        if seat.node_rank == 0:  # for programs that look for it there, as torch's nodes do
            keys = [RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY]
            values = [address.master_addr, str(address.master_port)]
            PrefixStore(prefix, self._own).multi_set(keys, values)
        return RendezvousInfo(PrefixStore(prefix, self._store), seat.node_rank, seat.nodes, address)

    def _raise_if_lost(self, node: ProgramNode) -> None:
        if node.error is not None:
            raise self._error(node.error) from node.error
        if node.finish is not None:
            raise RendezvousConnectionError(
                f"the rendezvous {self._run_id!r} ended: {node.finish.because}"
            )

    # The store.

    def _why_closed(self) -> str:
        """Why there is no further round, and what to do; empty: there may be one."""
        for pair in self._value.read(self._closed).pairs:
            return f"{pair.value.decode()}; use a new run id for a new job."
        return ""

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Convert a store's errors to those of a rendezvous."""
        try:
            yield
        except (StoreError, ControlMessageError) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> RendezvousError:
        if isinstance(error, ControlMessageError):
            return RendezvousStateError(
                f"the rendezvous {self._run_id!r} cannot be read from its store: {error}"
            )
        return RendezvousConnectionError(
            f"the rendezvous {self._run_id!r} cannot reach its store: {error}"
        )


def create_handler(
    store: Store, backend: Named | str, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Create the handler of one node, with torch's options: join_timeout, last_call_timeout,
    close_timeout, keep_alive_interval, keep_alive_max_attempt, in seconds and heartbeats.
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


def _choose(store: Store, local_addr: str | None) -> NetworkChoice:
    """This machine's address for the nodes that share the store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    hosts = []
    if isinstance(store, TCPStore):
        hosts = [store.host]
    elif isinstance(store, HashStore):  # of this process
        hosts = [_LOOPBACK]
    return choose_network(hosts, os.environ, local_addr=local_addr, by="local_addr")


def _keep_silent(text: str) -> None:
    """A program learns everything from its calls."""
