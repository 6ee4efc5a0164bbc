"""A rendezvous handler whose node is a thread: what the program waits for, and for how long.

This module has the waits, deadlines and errors; what a seat gives access to, and how a rendezvous
is closed, differs: handler.py, store_handler.py.
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod

from rallypoint.base.errors import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from rallypoint.launch.api.program_node import ProgramNode
from rallypoint.rendezvous.api.parameters import RendezvousTimeout
from rallypoint.rendezvous.api.rendezvous_handler import RendezvousHandler, RendezvousInfo
from rallypoint.rendezvous.job.round import Seat


class NodeHandler(RendezvousHandler):
    """One node. Its thread ends when the handler is no longer referenced."""

    # How long to wait beyond join_timeout, if the others may say why no round begins.
    _grace_s = 0.0

    def __init__(self, backend: str, run_id: str, timeout: RendezvousTimeout) -> None:
        self._backend = backend
        self._run_id = run_id
        self._join_s = timeout.join.total_seconds()
        self._close_s = timeout.close.total_seconds()
        self._node: ProgramNode | None = None

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """See RendezvousHandler. Node 0 serves one for each round."""
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + self._join_s + self._grace_s
        node = self._node
        if node is None:
            node = self._begin()
        else:
            node.want_round()
        while True:
            info = self._enter(node, self._await_seat(node, deadline), deadline)
            if info is not None:
                return info
            node.want_round()

    def is_closed(self) -> bool:
        """See RendezvousHandler. Not known before `next_rendezvous`."""
        return self._node is not None and bool(self._node.closed)

    def num_nodes_waiting(self) -> int:
        """See RendezvousHandler.

        It is also 1 when the round is over for another reason: a node was lost, or this one has
        lost the others.
        """
        node = self._node
        if node is None or node.round < 0:
            return 0
        with node.changed:
            return node.waiting

    # For each kind.

    @abstractmethod
    def _make_node(self) -> ProgramNode:
        """A new node, which has not started."""

    @abstractmethod
    def _enter(self, node: ProgramNode, seat: Seat, deadline: float) -> RendezvousInfo | None:
        """What that seat gives access to; None: the round has already ended."""

    @abstractmethod
    def _raise_if_lost(self, node: ProgramNode) -> None:
        """Raise if that node no longer takes part, although the rendezvous is not closed."""

    # For all.

    def _begin(self) -> ProgramNode:
        node = self._node = self._make_node()
        weakref.finalize(self, node.end)
        node.start()
        return node

    def _await_seat(self, node: ProgramNode, deadline: float) -> Seat:
        was_spare = False  # until this is closed, which stops the round that had no room
        with node.changed:
            while True:
                was_spare = was_spare or node.is_spare
                if node.closed:
                    kind = RendezvousGracefulExitError if was_spare else RendezvousClosedError
                    raise kind(f"the rendezvous {self._run_id!r} is closed: {node.closed}")
                self._raise_if_lost(node)
                seat = node.take_seat()
                if seat is not None:
                    return seat
                now = time.monotonic()
                if node.is_spare:  # there is no room for it: it waits as long as necessary
                    deadline = now + self._join_s
                if now >= deadline:
                    break
                node.changed.wait(deadline - now)
            missing = node.missing or "nodes of the previous round have not rejoined"
        self._let_go(node)
        raise RendezvousTimeoutError(
            f"no round of {self._run_id!r} began within {self._join_s:g} s: {missing}; check the "
            "other nodes, or allow more time with join_timeout."
        )

    def _let_go(self, node: ProgramNode) -> bool:
        """Give up the node's place; returns whether its thread has ended."""
        self._node = None
        node.withdraw()
        return node.join(self._close_s)
