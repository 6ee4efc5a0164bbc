"""The rendezvous of a job that no node can lose, for Python programs (backends c10d and etcd).

The program's calls, parameters and errors are here; its node lives in program_node.py.
"""

from __future__ import annotations

import os
import time
import weakref
from datetime import timedelta

from rallypoint.base.errors import (
    InvalidArgumentError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    StoreConnectionError,
)
from rallypoint.launch.api.program_node import ProgramNode
from rallypoint.launch.job import Job, Rendezvous
from rallypoint.launch.rounds.elastic import ElasticRounds, rounds_of
from rallypoint.rendezvous.api.handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from rallypoint.rendezvous.api.parameters import (
    RendezvousParameters,
    read_timeouts,
    texts,
)
from rallypoint.rendezvous.job.round import Endpoint, Seat
from rallypoint.store.client import TCPStore
from rallypoint.store.file import FileStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.store import DEFAULT_TIMEOUT

PORTS = {"c10d": 29400, "etcd": 2379}
_REACH_S = 2.0  # for one try to reach a round's store
_GRACE_S = 1.0  # for the one who leads to say who is missing, rather than only that it took long


class ElasticRendezvousHandler(RendezvousHandler):
    """One node of a dynamic job.

    Raises:
        HostError: nobody knows the endpoint's name, or there is no way to it.
        InvalidArgumentError: parameters that cannot be.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._timeout = read_timeouts(params)
        self._params = params
        self._round = -1
        self._node: ProgramNode | None = None
        self._store: TCPStore | None = None
        # Who is at the endpoint listens there from now on.
        self._rounds: ElasticRounds | None = _rounds_of(params)

    def get_backend(self) -> str:
        """See RendezvousHandler."""
        return self._params.backend

    @property
    def use_agent_store(self) -> bool:
        """See RendezvousHandler. It is the round's own."""
        return True

    def get_run_id(self) -> str:
        """See RendezvousHandler."""
        return self._params.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """See RendezvousHandler. The round's store is on node 0, and ends with the round."""
        deadline = time.monotonic() + self._timeout.join.total_seconds() + _GRACE_S
        node = self._node
        if node is None:
            node = self._begin()
        else:
            node.want_round()
        if self._store is not None:
            self._store.close()
            self._store = None
        while True:
            seat = self._await(node, deadline)
            self._round = seat.number
            self._store = self._reach(node, seat, deadline)
            if self._store is not None:
                break
            node.want_round()
        return RendezvousInfo(
            PrefixStore(f"rallypoint.rendezvous/{self._params.run_id}/{seat.number}", self._store),
            seat.node_rank,
            seat.nodes,
            RendezvousStoreInfo(seat.store.host, seat.store.port),
        )

    def is_closed(self) -> bool:
        """See RendezvousHandler. Before `next_rendezvous` nothing is known."""
        return self._node is not None and bool(self._node.closed)

    def set_closed(self) -> None:
        """See RendezvousHandler. Who did not take part yet has to, for as long as it takes.

        Raises:
            RendezvousTimeoutError: nobody confirmed it within close_timeout.
        """
        node = self._node or self._begin()
        timeout_s = self._timeout.close.total_seconds()
        deadline = time.monotonic() + timeout_s
        node.close()
        with node.changed:
            while not (node.closed or node.finish or node.error):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise RendezvousTimeoutError(
                        f"the rendezvous {self._params.run_id!r} could not be closed within"
                        f" {timeout_s:g} s; look whether the node that leads is there."
                    )
                node.changed.wait(left_s)

    def num_nodes_waiting(self) -> int:
        """See RendezvousHandler.

        It is 1 as well when the round is over for another reason: a node was lost, or this one has
        lost the others.
        """
        node = self._node
        if node is None or self._round < 0:
            return 0
        with node.changed:
            has_ended = node.stopped or node.finish or node.error
            return max(1, node.waiting) if has_ended and not node.closed else 0

    def shutdown(self) -> bool:
        """See RendezvousHandler."""
        if self._store is not None:
            self._store.close()
            self._store = None
        node, self._node = self._node, None
        if node is None:
            if self._rounds is not None:
                self._rounds.close()
                self._rounds = None
            return True
        node.close()
        node.end()
        return node.join(self._timeout.close.total_seconds()) and bool(node.closed)

    def _begin(self) -> ProgramNode:
        rounds, self._rounds = self._rounds or _rounds_of(self._params), None
        self._node = ProgramNode(rounds, os.uname().nodename)
        weakref.finalize(self, self._node.end)
        self._round = -1
        return self._node

    def _await(self, node: ProgramNode, deadline: float) -> Seat:
        with node.changed:
            while True:
                self._raise_if_over(node)
                seat = node.take_seat(self._round)
                if seat is not None:
                    return seat
                now = time.monotonic()
                if now >= deadline:
                    if not node.is_spare:
                        break
                    deadline = now + self._timeout.join.total_seconds()
                node.changed.wait(deadline - now)
        self._node = None
        node.withdraw()
        node.join(self._timeout.close.total_seconds())
        raise RendezvousTimeoutError(
            f"no round of {self._params.run_id!r} began within"
            f" {self._timeout.join.total_seconds():g} s: nodes of the round before have not come"
            " back; look at them, or give them more time with join_timeout."
        )

    def _reach(self, node: ProgramNode, seat: Seat, deadline: float) -> TCPStore | None:
        """A client of the round's store; None if the round was over before it could be reached."""
        while True:
            try:
                timeouts = timedelta(seconds=_REACH_S)
                store = TCPStore(seat.store.host, seat.store.port, timeout=timeouts)
            except StoreConnectionError as error:
                with node.changed:
                    if node.stopped or node.finish or node.error:
                        return None
                if time.monotonic() < deadline:
                    continue
                raise RendezvousConnectionError(
                    f"the store of round {seat.number} cannot be reached: {error}"
                ) from error
            store.set_timeout(DEFAULT_TIMEOUT)
            return store

    def _raise_if_over(self, node: ProgramNode) -> None:
        name = self._params.run_id
        if node.closed:
            kind = RendezvousGracefulExitError if node.is_spare else RendezvousClosedError
            raise kind(f"the rendezvous {name!r} is closed: {node.closed}")
        if node.error is None and node.finish is None:
            return
        self._node = None  # another try is a newcomer's
        node.end()
        if node.error is not None:
            raise RendezvousConnectionError(
                f"the rendezvous {name!r} was lost: {node.error}"
            ) from node.error
        assert node.finish is not None
        text = f"the rendezvous {name!r} ended: {node.finish.because}"
        if node.finish.was_cut_off:
            raise RendezvousConnectionError(text)
        raise RendezvousTimeoutError(text)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of one node. Options are those of --rdzv-conf, and torch's ``store_type``.

    Raises:
        HostError: nobody knows the endpoint's name, or there is no way to it.
        InvalidArgumentError: parameters that cannot be.
    """
    kind = str(params.get("store_type", "tcp")).strip().lower()
    if kind == "file":
        from rallypoint.rendezvous.api.store_handler import create_handler as create_store_handler

        if not params.endpoint:
            raise InvalidArgumentError(
                "store_type=file needs an endpoint: the path of a file that all nodes see."
            )
        store = FileStore(params.endpoint, run_id=params.run_id)
        return create_store_handler(store, params.backend, params)
    if kind != "tcp":
        raise InvalidArgumentError(f"store_type is {kind!r}; it must be tcp or file.")
    return ElasticRendezvousHandler(params)


def _rounds_of(params: RendezvousParameters) -> ElasticRounds:
    configuration = texts(params.config)
    configuration.pop("token", None)
    wish = configuration.pop("rank", None)
    for name in ("heartbeat_timeout", "store_type"):
        configuration.pop(name, None)
    port = PORTS.get(params.backend, PORTS["c10d"])
    endpoints = Endpoint.parse_all(params.endpoint, port, name="the rendezvous endpoint")
    rendezvous = Rendezvous(
        backend=params.backend,
        endpoints=endpoints or (Endpoint(host="localhost", port=port),),
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        configuration=configuration,
        node_rank=None if wish is None else int(wish),
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
    """What nodes must know to take part: the option ``token``, or RALLYPOINT_TOKEN."""
    token = params.get("token", os.environ.get("RALLYPOINT_TOKEN"))
    return os.fsencode(token) or None if token else None
