"""Nodes that are known from the start (--nnodes, --node-rank, --master-addr, --master-port).

    node 0: coordinates (consensus/rules.py), has the workers' store at MASTER_ADDR:MASTER_PORT
    others: ask the store that is there before the first round for node 0's agent, and call it

Only node 0 listens. Its stores follow each other at one port: the first one holds a single key, and
each round has its own.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from datetime import timedelta
from functools import partial

from rallypoint.base.address import is_loopback, numeric_family
from rallypoint.base.errors import HostError, StoreConnectionError, StoreError
from rallypoint.cluster.interface_choice import NetworkChoice
from rallypoint.cluster.network import UnknownHostError, can_bind, choose_network, own_addresses
from rallypoint.launch.job import Job, Nodes, Verbosity
from rallypoint.launch.output.terminal import say
from rallypoint.launch.rounds.linked import CHECK_RESULT_S, LinkedRounds
from rallypoint.launch.rounds.store_host import (
    ANY,
    StoreHost,
    addresses_of_members,
    listen,
    listening_address,
)
from rallypoint.rendezvous.consensus.messages import Message, Setup
from rallypoint.rendezvous.consensus.register import PeerRegister
from rallypoint.rendezvous.consensus.rules import FixedRules
from rallypoint.rendezvous.job.coordinator import next_notice
from rallypoint.rendezvous.job.reports import Finish, NodeReport, Outcome
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.timeouts import NO_SILENCE, Timeouts
from rallypoint.store.client import TCPStore

_WHERE = "rallypoint/control"  # in the first store: the port of node 0's agent
_ATTEMPT = timedelta(seconds=1)
_RETRY_S = 0.2
_ANSWER = timedelta(seconds=10)
_STALLED_S = 1.5  # then a connection is made anew; the rest is time to do so
_LOST_S = 6.0


def rounds_of(job: Job) -> StaticHost | StaticGuest:
    """The rounds of several nodes that this job's agent takes part in."""
    return StaticGuest(job) if job.nodes.node_rank else StaticHost(job)


class _StaticRounds(LinkedRounds):
    """One of these nodes; node 0 is the only voter, so it leads as soon as it claims to."""

    def __init__(self, job: Job, listener: socket.socket | None) -> None:
        self._nodes = job.nodes
        super().__init__(
            _setup_of(job),
            partial(PeerRegister, rules=FixedRules),
            listener,
            job.nodes.token or b"",
            stalled_s=_STALLED_S,
            lost_s=_LOST_S,
            is_verbose=job.verbosity is Verbosity.VERBOSE,
        )
        self.to_find_out = job.to_find_out
        (self._endpoint,) = self._setup.endpoints


class StaticHost(_StaticRounds):
    """Node 0."""

    def __init__(self, job: Job) -> None:
        nodes = job.nodes
        self._is_local = is_loopback(nodes.master_addr)
        self._interface = _interface_of(nodes.master_addr)
        self._store: StoreHost | None = None
        if nodes.token is None and not self._is_local:
            say(
                "warning: anyone who can connect to this host can join the job; set the same"
                " RALLYPOINT_TOKEN on all nodes."
            )
        listener = listen(self._interface, 0)
        self._port = listener.getsockname()[1]
        super().__init__(job, listener)

    def open(self, selector: selectors.BaseSelector) -> None:
        self.network = _choose(self._nodes)
        try:
            self._store = StoreHost(self._interface, self._endpoint.port)
        except HostError as error:
            from rallypoint.store.port_holder import is_launcher  # not in each launch

            if not is_launcher(str(error)):
                raise
            of_two = "if that is another node of this job, give each node its own --node-rank"
            raise HostError(f"{str(error).rstrip('.')}; {of_two}.") from None
        self._store.serve()
        here = "127.0.0.1" if self._interface == ANY else self._interface
        with TCPStore(here, self._endpoint.port, timeout=_ANSWER) as first:
            first.set(_WHERE, str(self._port))
            first.check([_WHERE])  # an answer: it has been set
        super().open(selector)

    def close(self) -> None:
        super().close()
        if self._store is not None:
            self._store.close()

    def _open_store(self, number: int, members: tuple[Member, ...]) -> Endpoint:
        """At the one port: nothing uses the old store any more."""
        if self._store is not None:
            self._store.close()
        self._store = StoreHost(self._interface, self._endpoint.port)
        self._store.serve(None if self._is_local else addresses_of_members(members))
        return self._endpoint


class StaticGuest(_StaticRounds):
    """Any other node."""

    def __init__(self, job: Job) -> None:
        self._agent: Endpoint | None = None  # node 0's, once it is found
        self._silent_agent: Endpoint | None = None  # where it was to be, and did not answer
        self._ask_at: float | None = None
        self._began = self._notice_at = 0.0
        super().__init__(job, None)

    # RoundSource.

    @property
    def wake_at(self) -> float | None:
        if self._ask_at is None:
            return super().wake_at
        # On a busy machine it may still run when the last examination begins.
        if self._is_examining_start:
            return min(self._examine_at, time.monotonic() + CHECK_RESULT_S)
        return min(self._ask_at, self._examine_at)

    def tell(self, report: NodeReport) -> None:
        if self._agent is not None:  # else there is no agent to report to
            super().tell(report)

    def tick(self) -> None:
        if self._ask_at is None:
            super().tick()
            return
        self._examine_if_due()
        # It blocks for up to a second, and what was found is to be reported.
        if time.monotonic() >= self._ask_at and not self._is_examining_start:
            self._find_node_0()

    # Node 0.

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._notice_at = next_notice(self._began, self._began)
        self._find_node_0()

    def _find_node_0(self) -> None:
        """Find node 0's agent, and call it."""
        try:
            self._agent = self._ask()
        except StoreError as error:
            self._ask_later(str(error))
            return
        self._ask_at = None
        self.network = _choose(self._nodes)
        self._core = self._new_core()
        self._happened(self._core.started)

    def _ask(self) -> Endpoint:
        host, port = self._nodes.master_addr, self._nodes.master_port
        with TCPStore(host, port, timeout=_ATTEMPT) as first:
            is_there = first.check([_WHERE])
            text = first.get(_WHERE).decode("ascii", "replace") if is_there else ""
        if not (text.isdecimal() and 0 < int(text) < 65536):
            raise StoreConnectionError(
                "another server listens there, or a job that has already begun with other nodes"
            )
        return Endpoint(host=host, port=int(text))

    def _ask_later(self, why: str) -> None:
        self._agent = None
        now = time.monotonic()
        waited_s = now - self._began
        missing = f"node-rank 0, whose store should be at {self._endpoint}"
        if waited_s >= self._nodes.join_timeout_s:
            because = f"missing {missing}, after {waited_s:.0f} s ({why})"
            finish = Finish(outcome=Outcome.GIVEN_UP, because=because)
            self.orders.append(self._with_finding(finish))
        elif now >= self._notice_at:
            say(f"waiting for {missing}, for {waited_s:.0f} s so far: {why}")
            self._notice_at = next_notice(self._began, now)
        self._ask_at = now + _RETRY_S

    def _send(self, to: str, at: Endpoint | None, message: Message) -> None:
        """To the address where node 0 was found, which is known to work."""
        super()._send(to, self._agent, message)

    def _call(self, at: Endpoint, message: Message) -> None:
        if self._agent is not None:
            super()._call(self._agent, message)

    def _not_found(self, at: Endpoint, why: str) -> None:
        self._silent_agent = at
        self._ask_later(f"its agent at {at}: {why}")

    def _agent_to_examine(self) -> Endpoint | None:
        return self._agent or self._silent_agent

    def _name_of(self, at: Endpoint) -> str:
        return f"node 0 at {self._endpoint}"

    def _open_store(self, number: int, members: tuple[Member, ...]) -> Endpoint:
        raise RuntimeError(f"node 0 opens the store of round {number}, not this one")


def _setup_of(job: Job) -> Setup:
    nodes = job.nodes
    me = job.member.__replace__(key=os.urandom(8).hex())
    if not is_loopback(nodes.master_addr):
        me = me.__replace__(addresses=own_addresses())
    return Setup(
        me=me,
        run_id=job.run_id,
        limits=job.limits,
        endpoints=(Endpoint(host=nodes.master_addr, port=nodes.master_port),),
        slot=None if nodes.node_rank else 0,
        max_restarts=job.max_restarts,
        timeouts=Timeouts(join_timeout_s=nodes.join_timeout_s, missed_heartbeats=NO_SILENCE),
        quorum="host",
    )


def _choose(nodes: Nodes) -> NetworkChoice:
    """The interface at which this node's workers are reached; agents only call node 0's."""
    is_local = is_loopback(nodes.master_addr)
    choose = partial(
        choose_network,
        environ={} if is_local else os.environ,
        local_addr=nodes.local_addr,
        has_remote_peers=not is_local,
    )
    try:
        return choose([nodes.master_addr])
    except UnknownHostError:  # on node 0 itself, which does not need to know it
        return choose([])


def _interface_of(master_addr: str) -> str:
    """Where node 0 listens: at that address, if it is this machine's."""
    is_own = numeric_family(master_addr) is not None and can_bind(master_addr)
    return listening_address(master_addr, is_chosen=is_own)
