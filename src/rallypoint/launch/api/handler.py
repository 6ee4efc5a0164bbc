"""The rendezvous of a job that survives any node, for Python programs (backends c10d and etcd).

The program's calls, parameters and errors are here; its node is in program_node.py.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from rallypoint.base.errors import (
    InvalidArgumentError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    StoreConnectionError,
)
from rallypoint.launch.api.program_node import NodeHandler, ProgramNode
from rallypoint.launch.job import Job, Rendezvous
from rallypoint.launch.rounds.elastic import ElasticRounds, rounds_of
from rallypoint.rendezvous.api.rendezvous_handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    read_timeouts,
)
from rallypoint.rendezvous.job.round import Endpoint, Seat
from rallypoint.store.client import TCPStore
from rallypoint.store.file import FileStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.store import DEFAULT_TIMEOUT

PORTS = {"c10d": 29400, "etcd": 2379}
_REACH_S = 2.0  # limit for one try to reach a round's store
# Not for agents, or given to them in another way.
_OWN_OPTIONS = ("token", "rank", "heartbeat_timeout", "store_type")


class ElasticRendezvousHandler(NodeHandler):
    """One node of a dynamic job."""

    _grace_s = 1.0  # for the coordinator to report which nodes are missing

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(params.backend, params.run_id, read_timeouts(params))
        self._params = params
        self._store: TCPStore | None = None
        # The node at the endpoint listens there from now on.
        self._rounds: ElasticRounds | None = _rounds_of(params)

    def next_rendezvous(self) -> RendezvousInfo:
        """See RendezvousHandler. The round's store is on node 0, and ends with the round."""
        self._close_store()
        return super().next_rendezvous()

    def set_closed(self) -> None:
        """See RendezvousHandler. A node that has not joined joins first, however long it takes."""
        node = self._node or self._begin()
        node.close()
        with node.changed:
            if not node.changed.wait_for(
                lambda: node.closed or node.finish or node.error, self._close_s
            ):
                raise RendezvousTimeoutError(
                    f"the rendezvous {self._run_id!r} could not be closed within"
                    f" {self._close_s:g} s; check that the leading node is running."
                )

    def shutdown(self) -> bool:
        self._close_store()
        node, self._node = self._node, None
        if node is None:
            if self._rounds is not None:
                self._rounds.close()
                self._rounds = None
            return True
        node.close()
        node.end()
        return node.join(self._close_s) and bool(node.closed)

    # NodeHandler.

    def _make_node(self) -> ProgramNode:
        rounds, self._rounds = self._rounds or _rounds_of(self._params), None
        return ProgramNode(rounds, os.uname().nodename)

    def _enter(self, node: ProgramNode, seat: Seat, deadline: float) -> RendezvousInfo | None:
        while self._store is None:
            try:
                wait = timedelta(seconds=_REACH_S)
                self._store = TCPStore(seat.store.host, seat.store.port, timeout=wait)
            except StoreConnectionError as error:
                with node.changed:
                    if node.has_ended:
                        return None
                if time.monotonic() >= deadline:
                    raise RendezvousConnectionError(
                        f"the store of round {seat.number} cannot be reached: {error}"
                    ) from error
        self._store.set_timeout(DEFAULT_TIMEOUT)
        return RendezvousInfo(
            PrefixStore(f"rallypoint.rendezvous/{self._run_id}/{seat.number}", self._store),
            seat.node_rank,
            seat.nodes,
            RendezvousStoreInfo(seat.store.host, seat.store.port),
        )

    def _raise_if_lost(self, node: ProgramNode) -> None:
        if node.error is None and node.finish is None:
            return
        self._node = None  # another try is a new node's
        node.end()
        if node.finish is None:
            raise RendezvousConnectionError(
                f"the rendezvous {self._run_id!r} was lost: {node.error}"
            ) from node.error
        kind = RendezvousConnectionError if node.finish.was_cut_off else RendezvousTimeoutError
        raise kind(f"the rendezvous {self._run_id!r} ended: {node.finish.because}")

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler of one node. Options are --rdzv-conf's, and torch's ``store_type``."""
    kind = str(params.get("store_type", "tcp")).strip().lower()
    if kind == "file":
        from rallypoint.launch.api.store_handler import create_handler as create_store_handler

        if not params.endpoint:
            raise InvalidArgumentError(
                "store_type=file needs an endpoint: the path of a file that all nodes can access."
            )
        store = FileStore(params.endpoint, run_id=params.run_id)
        return create_store_handler(store, params.backend, params)
    if kind != "tcp":
        raise InvalidArgumentError(f"store_type is {kind!r}; it must be tcp or file.")
    return ElasticRendezvousHandler(params)


def _rounds_of(params: RendezvousParameters) -> ElasticRounds:
    port = PORTS.get(params.backend, PORTS["c10d"])
    endpoints = Endpoint.parse_all(params.endpoint, port, name="the rendezvous endpoint")
    rendezvous = Rendezvous(
        backend=params.backend,
        endpoints=endpoints or (Endpoint(host="localhost", port=port),),
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        configuration={
            key: str(value)
            for key, value in params.config.items()
            if value is not None and key not in _OWN_OPTIONS
        },
        node_rank=params.get_as_int("rank"),
        local_addr=params.local_addr,
        token=_token_of(params),
    )
    job = Job(
        command=("a program that calls next_rendezvous",),
        local_world_size=1,
        run_id=params.run_id,
        host=os.uname().nodename,
        environ={},
        rendezvous=rendezvous,
    )
    return rounds_of(job, rendezvous)


def _token_of(params: RendezvousParameters) -> bytes | None:
    """The token that nodes must know: the option ``token``, or RALLYPOINT_TOKEN."""
    token = params.get("token", os.environ.get("RALLYPOINT_TOKEN"))
    return os.fsencode(token) or None if token else None
