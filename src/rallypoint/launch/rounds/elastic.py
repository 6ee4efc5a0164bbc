"""Nodes that find each other and may come and go (--rdzv-backend c10d, etcd).

Every agent has an equal part in the job, which outlives any of them. What to say to whom, and when
to start and end workers, is rendezvous/consensus/participant.py's; here are its connections, clock
and stores. Where a keeper such as etcd holds the agreements, it decides who coordinates; all else
is the same.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from random import SystemRandom

from rallypoint.base.address import is_loopback, numeric_family
from rallypoint.base.errors import ControlMessageError
from rallypoint.launch.job import Job, Rendezvous, Talk
from rallypoint.launch.output.terminal import say
from rallypoint.launch.rounds.network_place import NetworkPlace, all_addresses, listening_place
from rallypoint.launch.rounds.source import RoundSource
from rallypoint.launch.rounds.store_host import StoreHost, listen
from rallypoint.rendezvous.allowed_addresses import ANY, addresses_of_members
from rallypoint.rendezvous.consensus.admission import why_not
from rallypoint.rendezvous.consensus.messages import (
    Beat,
    Call,
    Message,
    OpenStore,
    Over,
    Send,
    Setup,
)
from rallypoint.rendezvous.consensus.participant import Part, Participant
from rallypoint.rendezvous.consensus.peer_register import PeerRegister
from rallypoint.rendezvous.consensus.rules import KEEPER
from rallypoint.rendezvous.job.decision import NOTHING, Decision
from rallypoint.rendezvous.job.membership import Limits
from rallypoint.rendezvous.job.reports import (
    Finish,
    Join,
    Notice,
    Outcome,
    Refuse,
    Report,
    Start,
    Stop,
)
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.lease_clock import lease_time
from rallypoint.rendezvous.timeouts import read_attempt, read_is_host, read_quorum, read_timeouts
from rallypoint.rendezvous.transport.codec import decode, encode
from rallypoint.rendezvous.transport.link import TOKEN_REFUSED
from rallypoint.rendezvous.transport.peer_connections import PeerConnections, Receiver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.rendezvous.keyvalue.link import KeyValueLink

_GOODBYE_S = 2.0
# The guardian ends workers so long after we should have: within what the others wait (kill_s).
_GUARD_S = 0.2
_STALLED = 0.4  # of a lease; the rest is for a new connection, and for what it has to say first
_STRANGE_AFTER = 2


def rounds_of(job: Job, rendezvous: Rendezvous) -> ElasticRounds:
    """The rounds that this job's agent takes part in.

    Raises:
        HostError: nobody knows the endpoint's name, or there is no way to it.
        InvalidArgumentError: a configuration that cannot be.
    """
    configuration, endpoints = rendezvous.configuration, rendezvous.endpoints
    timeouts = read_timeouts(configuration, rendezvous.backend)
    if rendezvous.token is None and not is_loopback(endpoints[0].host):
        say(
            "warning: anyone who reaches the endpoint can take part in the job; set the same"
            " RALLYPOINT_TOKEN on all nodes."
        )
    is_etcd = rendezvous.backend == "etcd"
    place = NetworkPlace(rendezvous, is_host=False if is_etcd else read_is_host(configuration))
    place.find(timeouts.join_timeout_s)
    address, slot, listener = place.address, place.slot, place.listener
    if listener is None:
        listener = listen(listening_place(address, is_chosen=place.is_chosen), 0)
    me = Member(
        key=os.urandom(8).hex(),
        host=job.host,
        local_world_size=job.local_world_size,
        role=job.role,
        wish=rendezvous.node_rank,
        address=address,
        addresses=() if is_loopback(address) else all_addresses(),
        port=listener.getsockname()[1],
    )
    setup = Setup(
        me=me,
        run_id=rendezvous.run_id,
        limits=Limits(
            min_nodes=rendezvous.min_nodes,
            max_nodes=rendezvous.max_nodes,
            join_timeout_s=timeouts.join_timeout_s,
            last_call_s=timeouts.last_call_s,
        ),
        endpoints=endpoints,
        attempt=read_attempt(os.environ),
        slot=slot,
        max_restarts=job.max_restarts,
        timeouts=timeouts,
        quorum=read_quorum(configuration),
    )
    is_verbose, token = job.talk is Talk.VERBOSE, rendezvous.token or b""
    keeper = None if not is_etcd else _etcd(setup, configuration)
    place_of_stores = listening_place(address, is_chosen=place.is_chosen)
    return ElasticRounds(
        setup, listener, token, is_verbose=is_verbose, keeper=keeper, place=place_of_stores
    )


def _etcd(setup: Setup, configuration: Mapping[str, str]) -> KeyValueLink:
    from rallypoint.rendezvous.keyvalue.etcd_client import EtcdClient, read_tls  # http: only here
    from rallypoint.rendezvous.keyvalue.link import KeyValueLink

    places = [(each.host, each.port) for each in setup.endpoints]
    client = EtcdClient(places, timeout_s=setup.timeouts.read_s, tls=read_tls(configuration))
    return KeyValueLink(setup, client)


class ElasticRounds(RoundSource, Receiver):
    """One agent's part in a job that no single agent can lose.

    Args:
        listener: at the address and port that `setup.me` names; taken over.
        is_verbose: tell the reason of each decision.
        keeper: which decides who coordinates; None: the agents do.
        place: where workers' stores listen.
        speak: tell the user something.
    """

    may_leave = True
    tells_late_comers = False  # that the job is over; else they wait for the next one

    def __init__(
        self,
        setup: Setup,
        listener: socket.socket,
        token: bytes,
        *,
        is_verbose: bool = False,
        keeper: KeyValueLink | None = None,
        place: str = ANY,
        speak: Callable[[str], None] = say,
    ) -> None:
        super().__init__(setup.me.key)
        self._setup = setup
        self._keeper = keeper
        self._core = Participant(
            PeerRegister(setup) if keeper is None else keeper.register, SystemRandom()
        )
        stalled_s = _STALLED * setup.timeouts.silence_s
        self._board = PeerConnections(setup.me.key, token, listener, self, stalled_s=stalled_s)
        self._place = place
        self._say = speak
        self._news = ""  # what was told last, while there is no round
        self._is_verbose = is_verbose
        self._part = Part.SEEKING
        self._events: deque[Callable[[float], Decision]] = deque()
        self._is_busy = False
        self._stores: dict[int, StoreHost] = {}  # by round
        self._round = -1
        self._finish: Finish | None = None
        self._encoded: tuple[Message | None, bytes] = (None, b"")
        self._strangers: Counter[Endpoint] = Counter()  # calls in vain

    # RoundSource.

    def open(self, selector: selectors.BaseSelector) -> None:
        """See RoundSource."""
        selector.register(self._board, selectors.EVENT_READ, self._board.poll)
        if self._keeper is not None:
            selector.register(self._keeper, selectors.EVENT_READ, self._hear_keeper)
        self._happened(self._core.started)

    def tell(self, report: Report) -> None:
        """See RoundSource."""
        self._happened(lambda now: self._core.reported(report, now))

    def tick(self) -> None:
        """See RoundSource."""
        self._board.poll()
        self._hear_keeper()
        self._happened(self._core.tick)

    def fenced(self) -> None:
        """See RoundSource."""
        self._happened(self._core.fenced)

    def settle(self) -> None:
        """See RoundSource. Old stores can go."""
        for number in [each for each in self._stores if each < self._round]:
            self._stores.pop(number).close()

    def close(self) -> None:
        """See RoundSource. A node that leaves waits until the others agree: nobody looks for it."""
        deadline = time.monotonic() + _GOODBYE_S
        is_leaving = self._core.is_leaving
        with selectors.DefaultSelector() as selector:
            selector.register(self._board, selectors.EVENT_READ)
            if self._keeper is not None:
                selector.register(self._keeper, selectors.EVENT_READ)
            while is_leaving and self._core.part is not Part.DONE and time.monotonic() < deadline:
                alarm = deadline if self.wake_at is None else min(self.wake_at, deadline)
                selector.select(max(0.0, alarm - time.monotonic()))
                self.tick()
        self._board.close(_GOODBYE_S)
        if self._keeper is not None:
            self._keeper.close()
        for store in self._stores.values():
            store.close()

    # For a program that is a node by itself.

    @property
    def waiting(self) -> int:
        """How many nodes wait for the next round."""
        return self._core.waiting

    @property
    def is_stopping(self) -> bool:
        """Whether the newest round is being ended, wherever it runs."""
        return self._core.is_stopping

    @property
    def missing(self) -> str:
        """Who is missing for a round, as far as is known here; empty: one is only to be left."""
        if self.is_stopping:
            return ""
        least = self._setup.limits.min_nodes
        return self._core.missing or self._news or f"fewer than {least} nodes have come"

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
            self._say(str(error))
            return
        claimed = message.member.key if isinstance(message, Join) else getattr(message, "key", key)
        if isinstance(message, Join | Beat) and claimed != key:
            self._say(f"agent {key} spoke for another one, {claimed}; its word does not count.")
            return
        if isinstance(message, Join) and numeric_family(message.member.address) is None:
            wrong = f"its address {message.member.address!r} is no number; look at --local-addr"
            self._board.send(key, None, encode(Refuse(key, wrong)))
            return
        if isinstance(message, Join) and self._finish is not None:
            if self.tells_late_comers and not why_not(self._setup, message):
                self._board.send(key, None, encode(Over(finish=self._finish)))
            return
        self._happened(lambda now: self._core.received(key, message, now))  # type: ignore[arg-type]

    def gone(self, key: str, why: str) -> None:
        """See Receiver."""
        if self._keeper is not None:
            self._keeper.lost(key)
        self._happened(lambda now: self._core.closed(key, why, now))

    def failed(self, address: str, what: str) -> None:
        """See Receiver."""
        self._say(f"the agent at {address}: {what}.")

    def unreachable(self, at: Endpoint, why: str) -> None:
        """See Receiver."""
        if why == TOKEN_REFUSED and not self._core.job and self._setup.endpoints:
            because = f"the agent at {at} does not let this node in: {why}"
            finish = Finish(outcome=Outcome.GIVEN_UP, because=because, was_cut_off=True)
            self.orders.append(finish)
            return
        self._name_stranger(at, why)
        self._happened(lambda now: self._core.unreachable(at, why, now))

    def _name_stranger(self, at: Endpoint, why: str) -> None:
        """At an endpoint of this machine is a program that does not answer as an agent: say which.

        Not at the first time: an agent that begins or ends can look the same for a moment.
        """
        is_here = is_loopback(at.host) or at.host in (self._setup.me.address, os.uname().nodename)
        self._strangers[at] += 1
        if not is_here or self._strangers[at] != _STRANGE_AFTER:
            return
        from rallypoint.store.port_holder import holder_of

        holder = holder_of(at.port)
        if holder.startswith("process"):  # else nobody listens there
            self._say(
                f"the endpoint {at} is held by {holder}, which does not answer as an agent of this"
                f" job ({why}); end that, or choose another --rdzv-endpoint."
            )

    # The keeper.

    def _hear_keeper(self) -> None:
        for answer in [] if self._keeper is None else self._keeper.take():
            self._happened(partial(self._answered, answer))

    def _answered(self, answer: Message | str, now: float) -> Decision:
        if isinstance(answer, str):
            self._news = answer
            places = self._setup.endpoints
            return self._core.unreachable(places[0], answer, now) if places else NOTHING
        return self._core.received(KEEPER, answer, now)

    # The core.

    def _happened(self, event: Callable[[float], Decision]) -> None:
        """Let it decide on an event. What happens while that is performed comes after it."""
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._events:
                self._perform(self._events.popleft()(lease_time()))
        finally:
            self._is_busy = False
        alarms = [] if self._board.wake_at is None else [self._board.wake_at]
        if self._core.wake_at is not None:
            alarms.append(self._core.wake_at - lease_time() + time.monotonic())
        self.wake_at = min(alarms, default=None)
        fence_at = self._core.fence_at
        self.fence_at = None if fence_at is None else fence_at + _GUARD_S

    def _perform(self, decision: Decision) -> None:
        self._tell(decision.reason)
        for action in decision.actions:
            match action:
                case Send(to=to, message=message) if to == KEEPER and self._keeper is not None:
                    self._keeper.send(message)
                case Call(message=message) if self._keeper is not None:
                    self._keeper.send(message)
                case Send(to=to, at=at, message=message):
                    self._board.send(to, at, self._bytes_of(message))
                case Call(at=at, message=message):
                    self._board.call(at, self._bytes_of(message))
                case OpenStore(round=number, members=members):
                    self._open_store(number, members)
                case Start(seat=seat):
                    self._round, self._news = seat.number, ""
                    self.orders.append(action)
                case Stop():
                    self.orders.append(action)
                case Finish():
                    self._finish = action
                    self.orders.append(action)
                case Notice(text):
                    self._news = text
                    self._say(text)

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
            self._say(f"{reason}" if not self._is_verbose else f"{self._part.value}: {reason}")

    def _open_store(self, number: int, members: tuple[Member, ...]) -> None:
        """On a fresh port in each round, for its members only."""
        if number in self._stores:
            self._stores.pop(number).close()
        are_all_here = all(is_loopback(member.address) for member in members)
        own = self._setup.me.address
        store = self._stores[number] = StoreHost(self._place)
        store.serve(None if are_all_here else addresses_of_members(members))
        endpoint = Endpoint(host=own, port=store.port)
        self._happened(lambda now: self._core.store_opened(number, endpoint, now))
