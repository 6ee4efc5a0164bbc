"""Nodes that find each other and may come and go (--rdzv-backend c10d, etcd).

Every agent has an equal part in the job, which outlives any of them. What to say to whom, and when
to start and end workers, is rendezvous/decide.py's; here are its connections, clock and stores.
With etcd, it decides who coordinates, and all else is the same.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from random import SystemRandom

from rallypoint.base.address import is_loopback, numeric_family
from rallypoint.base.errors import ControlMessageError, HostError
from rallypoint.cluster.network import check_reachable, is_here, own_address
from rallypoint.launch.job import Job, Rendezvous, Talk
from rallypoint.launch.meeting import Meeting
from rallypoint.launch.store_host import ANY, StoreHost, listen
from rallypoint.launch.terminal import say
from rallypoint.rendezvous.decide import Part, Participant
from rallypoint.rendezvous.link import TOKEN_REFUSED
from rallypoint.rendezvous.members import Limits
from rallypoint.rendezvous.messages import decode, encode
from rallypoint.rendezvous.patience import read_attempt, read_is_host, read_patience, read_quorum
from rallypoint.rendezvous.protocol import (
    Begin,
    Call,
    Decision,
    Message,
    OpenStore,
    Over,
    Send,
    Setup,
)
from rallypoint.rendezvous.reports import Finish, Join, Notice, Outcome, Refuse, Report, Start, Stop
from rallypoint.rendezvous.round import Endpoint, Member
from rallypoint.rendezvous.rules import ETCD, Rules
from rallypoint.rendezvous.switchboard import Receiver, Switchboard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.rendezvous.etcd_link import EtcdLink

_GOODBYE_S = 2.0
_BINDING_S = 0.5


def meeting_of(job: Job, rendezvous: Rendezvous) -> Dynamic:
    """The meeting that this job's agent takes part in.

    Raises:
        HostError: nobody knows the endpoint's name, or there is no way to it.
        InvalidArgumentError: a configuration that cannot be.
    """
    configuration, endpoints = rendezvous.configuration, rendezvous.endpoints
    patience = read_patience(configuration, rendezvous.backend)
    address = _own_address(endpoints, rendezvous.local_addr)
    if rendezvous.token is None and not is_loopback(endpoints[0].host):
        say(
            "warning: anyone who reaches the endpoint can take part in the job; set the same"
            " RALLYPOINT_TOKEN on all nodes."
        )
    slot, listener = None, None
    is_etcd = rendezvous.backend == "etcd"
    if not is_etcd:
        slot, listener = _take_endpoint(endpoints, read_is_host(configuration))
    if listener is None:
        listener = listen(_place_of(address), 0)
    me = Member(
        key=os.urandom(8).hex(),
        host=job.host,
        local_world_size=job.local_world_size,
        role=job.role,
        wish=rendezvous.node_rank,
        address=address,
        port=listener.getsockname()[1],
    )
    setup = Setup(
        me=me,
        run_id=rendezvous.run_id,
        limits=Limits(
            min_nodes=rendezvous.min_nodes,
            max_nodes=rendezvous.max_nodes,
            join_timeout_s=patience.join_timeout_s,
            last_call_s=patience.last_call_s,
        ),
        endpoints=endpoints,
        attempt=read_attempt(os.environ),
        slot=slot,
        max_restarts=job.max_restarts,
        patience=patience,
        quorum=read_quorum(configuration),
    )
    is_verbose, token = job.talk is Talk.VERBOSE, rendezvous.token or b""
    if not is_etcd:
        return Dynamic(setup, listener, token, is_verbose=is_verbose)
    from rallypoint.rendezvous.etcd_link import EtcdLink, read_tls  # threads, http: only here

    etcd = EtcdLink(setup, endpoints, read_tls(configuration))
    return Dynamic(setup, listener, token, is_verbose=is_verbose, etcd=etcd)


def _own_address(endpoints: tuple[Endpoint, ...], local_addr: str | None) -> str:
    """This node's, towards the first endpoint that has a name and a way to it."""
    first_error: HostError | None = None
    for endpoint in endpoints:
        try:
            address = own_address(endpoint.host, local_addr)
            check_reachable(address, (endpoint.host, endpoint.port))
        except HostError as error:
            first_error = first_error or error
        else:
            return address
    assert first_error is not None
    raise first_error


def _take_endpoint(
    endpoints: tuple[Endpoint, ...], is_host: bool | None
) -> tuple[int | None, socket.socket | None]:
    """Listen at the first endpoint that is this machine, if there is one and it is free."""
    if is_host is False:
        return None, None
    for slot, endpoint in enumerate(endpoints):
        if is_host or _is_here(endpoint, must_be_known=len(endpoints) == 1):
            listener = _listen(endpoint, is_ours=bool(is_host))
            if listener is not None:
                return slot, listener
    return None, None


def _is_here(endpoint: Endpoint, *, must_be_known: bool) -> bool:
    try:
        return is_here(endpoint.host)
    except HostError:
        if must_be_known:
            raise
        return False  # a machine that is down may have no name


def _listen(endpoint: Endpoint, *, is_ours: bool) -> socket.socket | None:
    """The endpoint's listener; None if another agent of this machine is there already."""
    deadline = time.monotonic() + _BINDING_S
    while True:
        try:
            return listen(_place_of(endpoint.host), endpoint.port)
        except HostError:
            if not is_ours and _answers(endpoint):
                return None
            # One that began just now has the port for a moment before it listens there.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _place_of(address: str) -> str:
    """Where to listen for those who know us by this address."""
    if not is_loopback(address):
        return ANY
    return "127.0.0.1" if address == "localhost" else address


def _answers(endpoint: Endpoint) -> bool:
    """Whether somebody listens at this port of this machine."""
    place = _place_of(endpoint.host)
    with socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET) as probe:
        return probe.connect_ex((place, endpoint.port)) == 0


class Dynamic(Meeting, Receiver):
    """One agent's part in a job that no single agent can lose.

    Args:
        listener: at the address and port that `setup.me` names; taken over.
        is_verbose: tell the reason of each decision.
        etcd: which decides who coordinates; None: the agents do.
    """

    may_leave = True

    def __init__(
        self,
        setup: Setup,
        listener: socket.socket,
        token: bytes,
        *,
        is_verbose: bool = False,
        etcd: EtcdLink | None = None,
    ) -> None:
        super().__init__(setup.me.key)
        self._setup = setup
        self._etcd = etcd
        self._core = Participant(setup, SystemRandom(), Rules if etcd is None else etcd.rules)
        self._board = Switchboard(setup.me.key, token, listener, self)
        self._is_verbose = is_verbose
        self._part = Part.SEEKING
        self._events: deque[Callable[[float], Decision]] = deque()
        self._is_busy = False
        self._stores: dict[int, StoreHost] = {}  # by round
        self._round = -1
        self._finish: Finish | None = None
        self._encoded: tuple[Message | None, bytes] = (None, b"")

    # Meeting.

    def open(self, selector: selectors.BaseSelector) -> None:
        """See Meeting."""
        selector.register(self._board, selectors.EVENT_READ, self._board.poll)
        if self._etcd is not None:
            selector.register(self._etcd, selectors.EVENT_READ, self._hear_etcd)
        self._happened(self._core.started)

    def tell(self, report: Report) -> None:
        """See Meeting."""
        self._happened(lambda now: self._core.reported(report, now))

    def tick(self) -> None:
        """See Meeting."""
        self._board.poll()
        self._hear_etcd()
        self._happened(self._core.tick)

    def settle(self) -> None:
        """See Meeting. Old stores can go."""
        for number in [each for each in self._stores if each < self._round]:
            self._stores.pop(number).close()

    def close(self) -> None:
        """See Meeting. Who leaves waits for the others to agree to it: nobody looks for it then."""
        deadline = time.monotonic() + _GOODBYE_S
        is_leaving = self._core.is_leaving
        with selectors.DefaultSelector() as selector:
            selector.register(self._board, selectors.EVENT_READ)
            if self._etcd is not None:
                selector.register(self._etcd, selectors.EVENT_READ)
            while is_leaving and self._core.part is not Part.DONE and time.monotonic() < deadline:
                alarm = deadline if self.wake_at is None else min(self.wake_at, deadline)
                selector.select(max(0.0, alarm - time.monotonic()))
                self.tick()
        self._board.close(_GOODBYE_S)
        if self._etcd is not None:
            self._etcd.close()
        for store in self._stores.values():
            store.close()

    # For a program that is a node by itself.

    @property
    def waiting(self) -> int:
        """How many nodes wait for the next round."""
        return self._core.waiting

    @property
    def is_led(self) -> bool:
        """Whether there is a coordinator to report to."""
        return self._core.part in (Part.FOLLOWING, Part.LEADING)

    @property
    def is_at_endpoint(self) -> bool:
        """Whether newcomers call this agent."""
        return self._setup.slot is not None

    # Receiver.

    def heard(self, key: str, payload: bytes) -> None:
        """See Receiver."""
        try:
            message = decode(payload)
        except ControlMessageError as error:
            say(str(error))
            return
        if isinstance(message, Join) and numeric_family(message.member.address) is None:
            wrong = f"its address {message.member.address!r} is no number; look at --local-addr"
            self._board.send(key, None, encode(Refuse(key, wrong)))
            return
        if isinstance(message, Join) and self._finish is not None:
            self._board.send(key, None, encode(Over(finish=self._finish)))
            return
        self._happened(lambda now: self._core.received(key, message, now))  # type: ignore[arg-type]

    def gone(self, key: str, why: str) -> None:
        """See Receiver."""
        if self._etcd is not None:
            self._etcd.lost(key)
        self._happened(lambda now: self._core.closed(key, why, now))

    def unreachable(self, at: Endpoint, why: str) -> None:
        """See Receiver."""
        if why == TOKEN_REFUSED and not self._core.job:
            because = f"the agent at {at} does not let this node in: {why}"
            finish = Finish(outcome=Outcome.GIVEN_UP, because=because, was_cut_off=True)
            self.orders.append(finish)
            return
        self._happened(lambda now: self._core.unreachable(at, why, now))

    # Etcd.

    def _hear_etcd(self) -> None:
        for answer in [] if self._etcd is None else self._etcd.take():
            self._happened(partial(self._answered, answer))

    def _answered(self, answer: Message | str, now: float) -> Decision:
        if isinstance(answer, str):
            return self._core.unreachable(self._setup.endpoints[0], answer, now)
        return self._core.received(ETCD, answer, now)

    # The core.

    def _happened(self, event: Callable[[float], Decision]) -> None:
        """Let it decide on an event. What happens while that is performed comes after it."""
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        while self._events:
            self._perform(self._events.popleft()(time.monotonic()))
        self._is_busy = False
        alarms = [at for at in (self._core.wake_at, self._board.wake_at) if at is not None]
        self.wake_at = min(alarms, default=None)

    def _perform(self, decision: Decision) -> None:
        self._tell(decision.reason)
        for action in decision.actions:
            match action:
                case Send(to=to, message=message) if to == ETCD and self._etcd is not None:
                    self._etcd.send(message)
                case Call(message=message) if self._etcd is not None:
                    self._etcd.send(message)
                case Send(to=to, at=at, message=message):
                    self._board.send(to, at, self._bytes_of(message))
                case Call(at=at, message=message):
                    self._board.call(at, self._bytes_of(message))
                case OpenStore(round=number, members=members):
                    self._open_store(number, members)
                case Begin(seat=seat, because=because):
                    self._round = seat.number
                    self.orders.append(Start(seat=seat, because=because))
                case Stop():
                    self.orders.append(action)
                case Finish():
                    self._finish = action
                    self.orders.append(action)
                case Notice(text):
                    say(text)

    def _bytes_of(self, message: Message) -> bytes:
        """Much is said to many in the same words."""
        if message is not self._encoded[0]:
            self._encoded = (message, encode(message))
        return self._encoded[1]

    def _tell(self, reason: str) -> None:
        """Tell the user of a new coordinator, or of a lost one; the rest on demand."""
        before, self._part = self._part, self._core.part
        is_known = self._core.round_before >= 0 and self._part is not Part.DONE
        has_changed = before is not self._part and (
            self._part in (Part.LEADING, Part.CAMPAIGNING) or before is Part.LEADING
        )
        if reason and (self._is_verbose or (is_known and has_changed)):
            say(f"{reason}" if not self._is_verbose else f"{self._part.value}: {reason}")

    def _open_store(self, number: int, members: tuple[Member, ...]) -> None:
        """On a fresh port in each round, for its members only."""
        if number in self._stores:
            self._stores.pop(number).close()
        addresses = [member.address for member in members]
        are_all_here = all(is_loopback(address) for address in addresses)
        own = self._setup.me.address
        store = self._stores[number] = StoreHost(_place_of(own))
        store.serve(None if are_all_here else addresses)
        endpoint = Endpoint(host=own, port=store.port)
        self._happened(lambda now: self._core.store_opened(number, endpoint, now))
