"""Nodes that find each other at an endpoint and may come and go (--rdzv-backend c10d).

    the agent that finds itself at the endpoint: coordinator, and the worker store of each round
    all others: call it there, join, report, obey

A node that dies is noticed by its closed connection, one that falls silent by missed beats. An
agent that loses the coordinator ends its workers first, then looks for it again as a newcomer:
whatever the others have agreed meanwhile, it is not part of it.
"""

from __future__ import annotations

import os
import selectors
import socket
import time

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.base.errors import ControlMessageError, HostError
from rallypoint.cluster.network import addresses_of, check_reachable, is_here, own_address
from rallypoint.launch.job import Job, Rendezvous
from rallypoint.launch.meeting import Alone, Meeting
from rallypoint.launch.store_host import ANY, StoreHost, listen
from rallypoint.launch.terminal import say
from rallypoint.rendezvous.coordinator import NOTICE_EVERY_S
from rallypoint.rendezvous.link import TOKEN_REFUSED, Called, Caller, Ear, Link
from rallypoint.rendezvous.members import Limits
from rallypoint.rendezvous.messages import REPORTS, Message, decode, encode
from rallypoint.rendezvous.patience import Patience, read_is_host, read_patience
from rallypoint.rendezvous.reports import (
    Ended,
    Finish,
    Join,
    Leave,
    Notice,
    Outcome,
    Refuse,
    Report,
    Start,
    Stop,
    StopAsked,
)
from rallypoint.rendezvous.round import Endpoint, Member, Round, Seat

_RETRY_S = 0.2
_GOODBYE_S = 2.0
_HANDSHAKE_S = 5.0
_BINDING_S = 0.5


def meeting_of(job: Job, rendezvous: Rendezvous) -> Meeting:
    """The meeting that this job's agent takes part in.

    Raises:
        HostError: nobody knows the endpoint's name, or there is no way to it.
        InvalidArgumentError: a configuration that cannot be.
    """
    patience = read_patience(rendezvous.configuration)
    endpoint = rendezvous.endpoints[0]
    address = own_address(endpoint.host, rendezvous.local_addr)
    check_reachable(address, (endpoint.host, endpoint.port))
    if rendezvous.token is None and not is_loopback(endpoint.host):
        say(
            "warning: anyone who reaches the endpoint can take part in the job; set the same"
            " RALLYPOINT_TOKEN on all nodes."
        )
    member = Member(
        key=os.urandom(8).hex(),
        host=job.host,
        local_world_size=job.local_world_size,
        role=job.role,
        wish=rendezvous.node_rank,
        address=address,
    )
    is_host = read_is_host(rendezvous.configuration)
    if is_host or (is_host is None and is_here(endpoint.host)):
        listener = _listen(endpoint, is_ours=bool(is_host))
        if listener is not None:
            return Host(job, rendezvous, patience, member, listener)
    return Guest(job, rendezvous, patience, member)


def _listen(endpoint: Endpoint, *, is_ours: bool) -> socket.socket | None:
    """The endpoint's listener; None if another agent of this machine is there already."""
    deadline = time.monotonic() + _BINDING_S
    while True:
        try:
            return listen("127.0.0.1" if is_loopback(endpoint.host) else ANY, endpoint.port)
        except HostError:
            with socket.socket() as probe:  # is it one to talk to?
                if not is_ours and probe.connect_ex(("127.0.0.1", endpoint.port)) == 0:
                    return None
            # One that began just now has the port for a moment before it listens there.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class Host(Alone, Ear):
    """The agent at the endpoint: the coordinator, for itself and for all who call."""

    def __init__(
        self,
        job: Job,
        rendezvous: Rendezvous,
        patience: Patience,
        member: Member,
        listener: socket.socket,
    ) -> None:
        limits = Limits(
            min_nodes=rendezvous.min_nodes,
            max_nodes=rendezvous.max_nodes,
            join_timeout_s=patience.join_timeout_s,
            last_call_s=patience.last_call_s,
        )
        super().__init__(job, member, limits)
        self._rendezvous = rendezvous
        self._patience = patience
        self._listener = listener
        self._links: dict[Link, str] = {}  # key of the member there; empty before it joined
        self._links_of: dict[str, Link] = {}  # by key
        self._is_over = False
        self._beat_at = 0.0

    def open(self, selector: selectors.BaseSelector) -> None:
        """See Meeting."""
        self._selector = selector
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._beat_at = time.monotonic() + self._patience.beat_s
        super().open(selector)

    def tick(self) -> None:
        """See Meeting."""
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + self._patience.beat_s
            for link in list(self._links):
                silent_s = now - link.heard_at
                if silent_s > (self._patience.silence_s if link.is_open else _HANDSHAKE_S):
                    link.close()
                    self.closed(link, f"silent for {silent_s:.1f} s")
                elif link.is_open:
                    link.beat()
        super().tick()
        self._set_alarm()

    def close(self) -> None:
        """See Meeting. The others must hear the last order before their links go."""
        self._selector.unregister(self._listener)
        self._listener.close()
        if not self._is_over:
            ended = Finish(outcome=Outcome.GIVEN_UP, because="the agent at the endpoint ended")
            self._send_all(ended)
        deadline = time.monotonic() + _GOODBYE_S
        for link in list(self._links):
            link.finish(deadline)
        super().close()

    # Links.

    def _accept(self) -> None:
        token = self._rendezvous.token or b""
        while True:  # thousands may call at once
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            try:
                self._links[Called(sock, self._selector, self, token)] = ""
            except OSError:  # gone already
                sock.close()

    def opened(self, link: Link) -> None:
        """See Ear."""

    def received(self, link: Link, payload: bytes) -> None:
        """See Ear."""
        key = self._links.get(link, "")
        now = time.monotonic()
        try:
            message = decode(payload)
        except ControlMessageError as error:
            say(f"{link.peer}: {error}")
            return
        if isinstance(message, Join) and not key:
            self._join(link, message, now)
        elif isinstance(message, REPORTS) and key:
            self._perform(self._coordinator.reported(key, message, now))

    def closed(self, link: Link, why: str) -> None:
        """See Ear."""
        key = self._links.pop(link, "")
        if key:
            self._links_of.pop(key, None)
            self._perform(self._coordinator.node_lost(key, why, time.monotonic()))

    def _join(self, link: Link, join: Join, now: float) -> None:
        ours, wanted = self._rendezvous, (join.min_nodes, join.max_nodes)
        wrong = ""
        if join.run_id != ours.run_id:
            wrong = f"the job here is {ours.run_id!r}, not {join.run_id!r}; give the same --rdzv-id"
        elif wanted != (ours.min_nodes, ours.max_nodes):
            here = f"{ours.min_nodes}:{ours.max_nodes}"
            wrong = f"--nnodes is {here} at the endpoint and {wanted[0]}:{wanted[1]} there"
        if wrong or join.member.key in self._links_of:
            link.send(encode(Refuse(join.member.key, wrong or "that member is here already")))
            return
        self._links[link] = join.member.key
        self._links_of[join.member.key] = link
        member = join.member.__replace__(address=link.peer, node_rank=-1)
        self._perform(self._coordinator.joined(member, now, join.last_round))

    # Orders.

    def _perform(self, decision: object) -> None:
        super()._perform(decision)  # type: ignore[arg-type]
        self._set_alarm()

    def _set_alarm(self) -> None:
        alarm = self._coordinator.wake_at
        self.wake_at = self._beat_at if alarm is None else min(alarm, self._beat_at)

    def _begin(self, opened: Round, because: str) -> dict[str, Seat]:
        """To each its own seat: all seats to all would be a gigabyte for 10,000 nodes."""
        seats = super()._begin(opened, because)
        for key, link in list(self._links_of.items()):
            if key in seats:
                link.send(encode(Start(seat=seats[key], because=because)))
        return seats

    def _give(self, order: Stop | Finish) -> None:
        super()._give(order)
        self._send_all(order)

    def _notice(self, text: str) -> None:
        super()._notice(text)
        self._send_all(Notice(text))

    def _refuse(self, refusal: Refuse) -> None:
        link = self._links_of.get(refusal.key)
        if link is not None:
            link.send(encode(refusal))

    def _send_all(self, message: Message) -> None:
        self._is_over = self._is_over or isinstance(message, Finish)
        payload = encode(message)
        for link in list(self._links_of.values()):
            link.send(payload)

    def _open_store(self, members: tuple[Member, ...]) -> Endpoint:
        """On a fresh port in each round, for its members only."""
        self.settle()
        addresses = [member.address for member in members]
        are_all_here = all(is_loopback(address) for address in addresses)
        self._old_store, self._store = self._store, StoreHost("127.0.0.1" if are_all_here else ANY)
        # The others may start their workers at once: unlike those of one node, they do not wait.
        self._store.serve(None if are_all_here else [*addresses, self._member.address])
        host = "127.0.0.1" if are_all_here else self._member.address
        return Endpoint(host=host, port=self._store.port)


class Guest(Meeting, Ear):
    """Any other node's agent."""

    may_leave = True

    def __init__(
        self, job: Job, rendezvous: Rendezvous, patience: Patience, member: Member
    ) -> None:
        super().__init__(member.key)
        self._job = job
        self._rendezvous = rendezvous
        self._patience = patience
        self._member = member
        self._link: Link | None = None
        self._round = self._last_round = -1  # what runs here, and ran at last
        self._is_over = False
        self._is_waiting = False  # for the end of its own workers, before it calls again
        self._attempts = 0
        self._why = "nobody has answered yet"
        self._began = self._notice_at = self._deadline = 0.0

    def open(self, selector: selectors.BaseSelector) -> None:
        """See Meeting."""
        self._selector = selector
        self._look_for(time.monotonic(), self._patience.join_timeout_s)
        self.tick()

    def tell(self, report: Report) -> None:
        """See Meeting."""
        if isinstance(report, StopAsked):
            self._is_over = True
            report = Leave(text=report.text)
        if isinstance(report, Ended):
            self._round = -1
        if self._link is not None:
            self._link.send(encode(report))
        if isinstance(report, Ended) and self._is_waiting:
            self._is_waiting = False
            self._look_for(time.monotonic(), self._patience.close_s)

    def tick(self) -> None:
        """See Meeting. Show that we are here, or try again to get there."""
        now = time.monotonic()
        self.wake_at = None
        if self._is_over or self._is_waiting:
            return
        link = self._link
        if link is None:
            self._try(now)
        elif now - link.heard_at > (self._patience.silence_s if link.is_open else _HANDSHAKE_S):
            link.close()
            self.closed(link, f"silent for {now - link.heard_at:.1f} s")
        elif link.is_open:
            link.beat()
        if self.wake_at is None and not self._is_over and not self._is_waiting:
            self.wake_at = time.monotonic() + self._patience.beat_s

    def settle(self) -> None:
        """See Meeting."""

    def close(self) -> None:
        """See Meeting."""
        if self._link is not None:
            self._link.finish(time.monotonic() + _GOODBYE_S)

    # Getting there.

    def _look_for(self, now: float, patience_s: float) -> None:
        self._began, self._deadline = now, now + patience_s
        self._notice_at = now + NOTICE_EVERY_S
        self.wake_at = now

    def _try(self, now: float) -> None:
        endpoint = self._rendezvous.endpoints[self._attempts % len(self._rendezvous.endpoints)]
        place = endpoint_of(endpoint.host, endpoint.port)
        waited_s = now - self._began
        if now >= self._deadline:
            return self._give_up(f"no coordinator at {place} after {waited_s:.0f} s: {self._why}")
        if now >= self._notice_at:
            self._notice_at += NOTICE_EVERY_S
            say(f"waiting for the coordinator at {place}, for {waited_s:.0f} s so far: {self._why}")
        self._attempts += 1
        self.wake_at = now + _RETRY_S
        try:
            address = addresses_of(endpoint.host)[0]
            token = self._rendezvous.token or b""
            self._link = Caller((address, endpoint.port), self._selector, self, token)
        except (OSError, HostError) as error:
            self._why = str(error)
        return None

    def opened(self, link: Link) -> None:
        """See Ear."""
        rendezvous = self._rendezvous
        join = Join(
            run_id=rendezvous.run_id,
            last_round=self._last_round,
            min_nodes=rendezvous.min_nodes,
            max_nodes=rendezvous.max_nodes,
            member=self._member,
        )
        link.send(encode(join))

    def closed(self, link: Link, why: str) -> None:
        """See Ear."""
        self._link = None
        if self._is_over:
            return
        self._why = why
        if why == TOKEN_REFUSED:
            return self._give_up(f"the coordinator does not let this node in: {why}")
        if not link.is_open:
            self.wake_at = time.monotonic() + _RETRY_S
            return None
        # What ran here may be part of no round any more; this agent comes back as a newcomer.
        self.key = os.urandom(8).hex()
        self._member = self._member.__replace__(key=self.key)
        lost = f"the coordinator at {link.peer} was lost: {why}"
        say(f"{lost}; looking for it for {self._patience.close_s:g} s")
        if self._round >= 0:
            self._is_waiting = True
            self.orders.append(Stop(round=self._round, because=lost))
        else:
            self._look_for(time.monotonic(), self._patience.close_s)
        return None

    def received(self, link: Link, payload: bytes) -> None:
        """See Ear."""
        try:
            message = decode(payload)
        except ControlMessageError as error:
            return self._give_up(f"{link.peer}: {error}")
        match message:
            case Start():
                self._round = self._last_round = message.seat.number
                self.orders.append(message)
            case Stop():
                self.orders.append(message)
            case Finish():
                self._is_over = True
                self.orders.append(message)
            case Refuse():
                self._give_up(f"the coordinator does not let this node in: {message.why}")
            case Notice():
                say(message.text)
        return None

    def _give_up(self, why: str) -> None:
        self._is_over = True
        self.orders.append(Finish(outcome=Outcome.GIVEN_UP, because=why))
