"""Nodes that are known from the start (--nnodes, --node-rank, --master-addr, --master-port).

    node 0: worker store at MASTER_ADDR:MASTER_PORT, control store at a port of its own, coordinator
    others: ask the first worker store for the control store, claim their node rank there, report,
            and watch for orders

Whoever dies is noticed by its closed connection, or by keepalive; the key that says that a node is
there ends with its connection. The control store spans rounds and asks for the job token.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from datetime import timedelta

from rallypoint.base.address import endpoint_of, is_loopback, numeric_family
from rallypoint.base.errors import (
    ControlMessageError,
    HostError,
    InvalidArgumentError,
    StoreConnectionError,
    StoreError,
    StoreRefusedError,
)
from rallypoint.cluster.network import can_bind
from rallypoint.launch.job import Job
from rallypoint.launch.output.terminal import say
from rallypoint.launch.rounds.source import LocalRounds, RoundSource
from rallypoint.launch.rounds.store_host import StoreHost, listen
from rallypoint.rendezvous.allowed_addresses import ANY, addresses_of_members
from rallypoint.rendezvous.job.coordinator import NOTICE_EVERY_S
from rallypoint.rendezvous.job.reports import Finish, Outcome, Report, Start, Stop
from rallypoint.rendezvous.job.round import Endpoint, Member, Round, Seat
from rallypoint.rendezvous.transport.codec import Opened, decode, encode
from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer
from rallypoint.store.watch import KeyEvent, Watch

_WHERE = "rallypoint/control"  # in the worker store, before the first round only
_NODES, _ORDERS, _CLAIMS, _JOB = "nodes/", "orders/", "claims/", "job"
_ATTEMPT_S = 1.0
_RETRY_S = 0.2
_ANSWER_S = 10.0
_GOODBYE_S = 5.0


class StaticHost(LocalRounds):
    """Node 0: the coordinator, for its own agent and for the others."""

    def __init__(self, job: Job) -> None:
        nodes = job.nodes
        self._is_local = is_loopback(nodes.master_addr)
        super().__init__(job, _member_of(job), job.limits)
        self._interface = _interface_of(nodes.master_addr)
        self._host = "127.0.0.1" if self._interface == ANY else self._interface
        self._server: StoreServer | None = None
        self._control: TCPStore | None = None
        self._watch: Watch | None = None
        self._sent = 0
        self._is_over = False

    def open(self, selector: selectors.BaseSelector) -> None:
        """See RoundSource."""
        nodes, token = self._job.nodes, self._job.nodes.token
        if token is None and not self._is_local:
            say(
                "warning: anyone who reaches this host can take part in the job; set the same"
                " RALLYPOINT_TOKEN on all nodes."
            )
        listener = listen(self._interface, 0)
        self._server = StoreServer(listen_fd=listener.detach(), token=token, log_fd=-1)
        port = self._server.port
        self._control = TCPStore(self._host, port, timeout=_seconds(_ANSWER_S), token=token)
        self._control.set(_JOB, f"{nodes.count} {self._job.run_id}")
        self._watch = self._control.watch(_NODES)
        selector.register(self._watch, selectors.EVENT_READ, self._read)
        self._store = StoreHost(self._interface, nodes.master_port)
        self._store.serve()
        with TCPStore(self._host, nodes.master_port, timeout=_seconds(_ANSWER_S)) as first:
            first.set(_WHERE, str(port))
            first.check([_WHERE])  # an answer: it has been set
        super().open(selector)

    def close(self) -> None:
        """See RoundSource. The others must hear the last order before its store goes."""
        if self._control is not None and self._watch is not None:
            if not self._is_over:
                self._send(Finish(outcome=Outcome.GIVEN_UP, because="the agent of node 0 ended"))
            self._wait_for_goodbyes(self._control, self._watch)
            self._watch.close()
            self._control.close()
        if self._server is not None:
            self._server.close()
        super().close()

    def _wait_for_goodbyes(self, control: TCPStore, watch: Watch) -> None:
        deadline = time.monotonic() + _GOODBYE_S
        try:
            while any(key.endswith("/here") for key in control.list_keys()):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not watch.events(left_s):
                    return
        except StoreError:
            return

    def _begin(self, opened: Round, because: str) -> dict[str, Seat]:
        self._send(Opened(round=opened, because=because))
        return super()._begin(opened, because)

    def _give(self, order: Stop | Finish) -> None:
        super()._give(order)
        self._send(order)

    def _send(self, order: Opened | Stop | Finish) -> None:
        if self._control is None:
            return
        self._is_over = self._is_over or isinstance(order, Finish)
        self._control.set(f"{_ORDERS}{self._sent}", encode(order))
        self._sent += 1

    def _open_store(self, members: tuple[Member, ...]) -> Endpoint:
        self.settle()
        if self._store is not None:
            self._store.close()
        self._store = StoreHost(self._interface, self._job.nodes.master_port)
        # The others may start their workers at once: unlike those of one node, they do not wait.
        self._store.serve(None if self._is_local else addresses_of_members(members))
        return Endpoint(host=self._job.nodes.master_addr, port=self._store.port)

    def _read(self) -> None:
        assert self._watch is not None
        assert self._control is not None
        for event in self._watch.events(0):
            self._happened(self._control, event)

    def _happened(self, control: TCPStore, event: KeyEvent) -> None:
        now = time.monotonic()
        rank_text, _, what = event.key.removeprefix(_NODES).partition("/")
        node_rank = int(rank_text) if rank_text.isdigit() else -1
        if what == "here" and event.value is None:
            control.delete_key(f"{_CLAIMS}{node_rank}")
            self._perform(self._coordinator.node_lost(rank_text, "its agent is gone", now))
        if event.value is None:
            return
        try:
            message = decode(event.value)
        except ControlMessageError as error:
            say(f"node {node_rank}: {error}")
            return
        if isinstance(message, Member) and message.key == rank_text:
            self._perform(self._coordinator.joined(message, now))
        elif isinstance(message, Report):
            control.delete_key(event.key)
            self._perform(self._coordinator.reported(rank_text, message, now))


class StaticGuest(RoundSource):
    """Any other node."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.member.key)
        self._job = job
        self._nodes = job.nodes
        self._endpoint = endpoint_of(self._nodes.master_addr, self._nodes.master_port)
        self._control: TCPStore | None = None
        self._watch: Watch | None = None
        self._claim_text = f"{os.urandom(8).hex()} {job.host}"  # the same for each try
        self._told = 0
        self._taken = 0
        self._begin = self._notice_at = 0.0

    def open(self, selector: selectors.BaseSelector) -> None:
        """See RoundSource."""
        self._selector = selector
        self._begin = time.monotonic()
        self._notice_at = self._begin + NOTICE_EVERY_S
        self.tick()

    def tick(self) -> None:
        """See RoundSource. Until node 0 is there: try again."""
        self.wake_at = None
        if self._control is not None or self.orders:
            return
        try:
            self._join()
        except StoreRefusedError as error:
            self._give_up(f"node 0 at {self._endpoint} does not let this node in: {error}")
        except StoreError as error:
            now = time.monotonic()
            waited_s = now - self._begin
            missing = f"node-rank 0, whose store should be at {self._endpoint}"
            if waited_s >= self._nodes.join_timeout_s:
                self._give_up(f"missing {missing}, after {waited_s:.0f} s ({error})")
                return
            if now >= self._notice_at:
                say(f"waiting for {missing}, for {waited_s:.0f} s so far: {error}")
                self._notice_at += NOTICE_EVERY_S
            self.wake_at = now + _RETRY_S

    def tell(self, report: Report) -> None:
        """See RoundSource."""
        if self._control is None:
            return
        try:
            self._control.set(self._key(f"report/{self._told}"), encode(report))
            self._told += 1
        except StoreError:
            return  # the watch finds out the same way

    def settle(self) -> None:
        """See RoundSource."""

    def close(self) -> None:
        """See RoundSource."""
        if self._watch is not None:
            self._watch.close()
        if self._control is not None:
            self._control.close()

    def _join(self) -> None:
        host, attempt = self._nodes.master_addr, _seconds(_ATTEMPT_S)
        with TCPStore(host, self._nodes.master_port, timeout=attempt) as first:
            if not first.check([_WHERE]):
                raise StoreConnectionError(
                    "there is another server, or a job that has begun already with other nodes"
                )
            port = int(first.get(_WHERE))
        control = TCPStore(host, port, timeout=_seconds(_ANSWER_S), token=self._nodes.token)
        try:
            self._claim(control)
            self._watch = control.watch(_ORDERS)
            _notice_silence(self._watch.fileno())
            control.set_ephemeral(self._key("here"), encode(_member_of(self._job)))
        except BaseException:
            control.close()
            raise
        self._control = control
        self._selector.register(self._watch, selectors.EVENT_READ, self._read)

    def _claim(self, control: TCPStore) -> None:
        count, _, run_id = control.get(_JOB).decode().partition(" ")
        if count != str(self._nodes.count):
            raise InvalidArgumentError(
                f"--nnodes is {self._nodes.count} here and {count} on node 0; give the same."
            )
        if run_id != self._job.run_id:
            raise InvalidArgumentError(
                f"the job at {self._endpoint} is {run_id!r}, not {self._job.run_id!r}; give the"
                " same --rdzv-id on all nodes, and each job its own --master-port."
            )
        name = f"{_CLAIMS}{self._nodes.node_rank}"
        holder = control.compare_set(name, "", self._claim_text).decode()
        if holder != self._claim_text:
            raise HostError(
                f"node rank {self._nodes.node_rank} is taken by host {holder.partition(' ')[2]!r};"
                f" this is {self._job.host!r}: give each node its own --node-rank."
            )

    def _read(self) -> None:
        assert self._watch is not None
        try:
            for event in self._watch.events(0):
                self._happened(event)
        except StoreConnectionError:
            self._end("its launcher ended, or the network between is down; look at its output")
        except ControlMessageError as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        assert self._watch is not None
        self._selector.unregister(self._watch)
        if not any(isinstance(order, Finish) for order in self.orders):
            self._give_up(f"node 0 at {self._endpoint} was lost: {why}")

    def _happened(self, event: KeyEvent) -> None:
        number = event.key.removeprefix(_ORDERS)
        # What there was before the watch comes in no particular order.
        if event.value is None or not number.isdigit() or int(number) < self._taken:
            return
        self._taken = int(number) + 1
        message = decode(event.value)
        if isinstance(message, Opened):
            seat = message.round.seats()[self.key]
            self.orders.append(Start(seat=seat, because=message.because))
        elif isinstance(message, Stop | Finish):
            self.orders.append(message)

    def _give_up(self, why: str) -> None:
        self.orders.append(Finish(outcome=Outcome.GIVEN_UP, because=why))

    def _key(self, name: str) -> str:
        return f"{_NODES}{self._nodes.node_rank}/{name}"


def rounds_of(job: Job) -> RoundSource:
    """The rounds of several nodes that this job's agent takes part in."""
    return StaticGuest(job) if job.nodes.node_rank else StaticHost(job)


def _member_of(job: Job) -> Member:
    """This agent, and from where its workers may come."""
    if is_loopback(job.nodes.master_addr):
        return job.member
    from rallypoint.cluster.interface import own_addresses

    return job.member.__replace__(addresses=own_addresses())


def _interface_of(master_addr: str) -> str:
    """Where node 0 listens: at that address, if it is one of this machine's."""
    if is_loopback(master_addr):
        return "127.0.0.1"
    is_own = numeric_family(master_addr) is not None and can_bind(master_addr)
    return master_addr if is_own else ANY


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def _notice_silence(fileno: int) -> None:
    """A peer whose cable was pulled says nothing: have the kernel ask, and end the connection."""
    with socket.socket(fileno=os.dup(fileno)) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
