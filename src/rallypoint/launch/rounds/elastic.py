"""Nodes that find each other and may come and go (--rdzv-backend c10d, etcd).

All agents are equal, and the job survives any of them: rendezvous/consensus decides, linked.py
performs. This module defines how the agents find each other, where each listens (names may not be
resolvable yet on a machine that is just starting), and where each round's store is. Where a keeper
such as etcd holds the agreements, it decides who coordinates; all else is the same.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import HostError
from rallypoint.base.record import Record
from rallypoint.base.worker_env import MOST_SILENCE_S, read_silence
from rallypoint.cluster.interface_choice import NetworkChoice
from rallypoint.cluster.names import in_thread
from rallypoint.cluster.network import (
    UnknownHostError,
    choose_network,
    is_here,
    is_own_name,
    own_addresses,
)
from rallypoint.launch.job import Job, Rendezvous, Verbosity
from rallypoint.launch.output.terminal import say
from rallypoint.launch.rounds.linked import LinkedRounds, lease_time
from rallypoint.launch.rounds.store_host import (
    ANY,
    StoreHost,
    addresses_of_members,
    listen,
    listening_address,
)
from rallypoint.rendezvous.consensus.messages import Action, Message, Over, Setup
from rallypoint.rendezvous.consensus.participant import Part
from rallypoint.rendezvous.consensus.peers import refusal_reason
from rallypoint.rendezvous.consensus.register import PeerRegister
from rallypoint.rendezvous.consensus.rules import KEEPER
from rallypoint.rendezvous.job.coordinator import next_notice
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.reports import NOTHING, Decision, Join
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.timeouts import (
    Timeouts,
    read_attempt,
    read_is_host,
    read_quorum,
    read_timeouts,
)
from rallypoint.rendezvous.transport.codec import encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.rendezvous.keyvalue.key_value_link import KeyValueLink

_STALLED = 0.4  # of a lease; the rest is for a new connection, and for what it has to say first
_REPORTED_CALL = 2
_BINDING_S = 0.5
_RETRY_S = 1.0  # for a name


def rounds_of(job: Job, rendezvous: Rendezvous) -> ElasticRounds:
    """The rounds that this job's agent takes part in."""
    configuration = rendezvous.configuration
    timeouts = read_timeouts(configuration, rendezvous.backend)
    warn_without_token(rendezvous)
    is_etcd = rendezvous.backend == "etcd"
    listener = find_listener(
        rendezvous,
        is_host=False if is_etcd else read_is_host(configuration),
        wait_s=timeouts.join_timeout_s,
        to_find_out=job.to_find_out,
    )
    setup = setup_of(job, rendezvous, timeouts, listener, attempt=read_attempt(os.environ))
    rounds = ElasticRounds(
        setup,
        listener.server_socket,
        rendezvous.token or b"",
        is_verbose=job.verbosity is Verbosity.VERBOSE,
        keeper=_etcd(setup, configuration) if is_etcd else None,
        store_address=listener.store_address,
    )
    rounds.network = listener.network
    rounds.to_find_out = job.to_find_out
    return rounds


def warn_without_token(rendezvous: Rendezvous) -> None:
    """Warn if other machines can connect."""
    if rendezvous.token is None and not is_loopback(rendezvous.endpoints[0].host):
        say(
            "warning: anyone who can connect to the endpoint can join the job; set the same"
            " RALLYPOINT_TOKEN on all nodes."
        )


def setup_of(
    job: Job, rendezvous: Rendezvous, timeouts: Timeouts, listener: AgentListener, *, attempt: int
) -> Setup:
    """This agent's initial state, where it listens there."""
    at = listener.endpoint
    me = Member(
        # Agents of one host get their ranks in the order in which they were started.
        key=f"{os.getpid():08x}{os.urandom(8).hex()}",
        host=job.host,
        local_world_size=job.local_world_size,
        role=job.role,
        wish=rendezvous.node_rank,
        address=at.host,
        addresses=() if is_loopback(at.host) else own_addresses(),
        port=at.port,
    )
    return Setup(
        me=me,
        run_id=rendezvous.run_id,
        limits=Limits(
            min_nodes=rendezvous.min_nodes,
            max_nodes=rendezvous.max_nodes,
            join_timeout_s=timeouts.join_timeout_s,
            last_call_s=timeouts.last_call_s,
        ),
        endpoints=rendezvous.endpoints,
        attempt=attempt,
        slot=listener.slot,
        max_restarts=job.max_restarts,
        timeouts=timeouts,
        quorum=read_quorum(rendezvous.configuration),
    )


def _etcd(setup: Setup, configuration: Mapping[str, str]) -> KeyValueLink:
    from rallypoint.rendezvous.keyvalue.etcd_client import EtcdClient, read_tls  # http: only here
    from rallypoint.rendezvous.keyvalue.key_value_link import KeyValueLink

    endpoints = [(each.host, each.port) for each in setup.endpoints]
    client = EtcdClient(endpoints, timeout_s=setup.timeouts.read_s, tls=read_tls(configuration))
    return KeyValueLink(setup, client, lease_time)


class AgentListener(Record, kw_only=True):
    """Where a node's agent listens.

    Attributes:
        network: the address for others, and why.
        store_address: where the stores of its workers listen.
        slot: which endpoint it is; None: none.
    """

    network: NetworkChoice
    store_address: str
    server_socket: socket.socket
    slot: int | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Where others find it."""
        return Endpoint(host=self.network.address, port=self.server_socket.getsockname()[1])


def find_listener(
    rendezvous: Rendezvous, *, is_host: bool | None, wait_s: float, to_find_out: str
) -> AgentListener:
    """Wait for names that cannot be resolved yet, as of a starting machine.

    Args:
        is_host: whether this node listens at an endpoint; None: if one is on this machine.
        wait_s: for how long to wait.
        to_find_out: see Job.
    """
    found: list[AgentListener] = []
    began = notice_at = time.monotonic()
    while True:
        try:
            in_thread(lambda: found.append(_find(rendezvous, is_host=is_host)))
            return found[0]
        except UnknownHostError as error:
            now = time.monotonic()
            if now >= began + wait_s:
                raise HostError(f"after {now - began:.0f} s: {error}") from None
            if now >= notice_at:
                text = f"waiting for a name to resolve, for {now - began:.0f} s so far: {error}"
                if notice_at == began:
                    waits = f"waiting for up to {wait_s:.0f} s, as it may be known only later"
                    text = f"{str(error).rstrip('.')}; {waits}; {to_find_out}"
                notice_at = next_notice(began, now)
                say(text)
        time.sleep(min(_RETRY_S, wait_s))


def listen_at_any_port(choice: NetworkChoice) -> AgentListener:
    """Listen at an address that is no endpoint."""
    address = listening_address(choice.address, is_chosen=choice.is_wished and choice.is_own)
    return AgentListener(network=choice, store_address=address, server_socket=listen(address, 0))


def _find(rendezvous: Rendezvous, *, is_host: bool | None) -> AgentListener:
    """Listen at the first endpoint that is on this machine, if it is free."""
    choice, local_addr = _choose(rendezvous), rendezvous.local_addr
    address, is_wished = choice.address, choice.is_wished and choice.is_own
    for slot, endpoint in enumerate(rendezvous.endpoints if is_host is not False else ()):
        if is_host or _is_here(endpoint, rendezvous):
            is_chosen = is_wished and endpoint.host in (local_addr, address)
            host = listening_address(address if is_chosen else endpoint.host, is_chosen=is_chosen)
            listener = _listen(host, endpoint.port, is_ours=bool(is_host))
            if listener is not None:
                store_address = listening_address(address, is_chosen=is_wished)
                return AgentListener(
                    network=choice, store_address=store_address, server_socket=listener, slot=slot
                )
    return listen_at_any_port(choice)


def _choose(rendezvous: Rendezvous) -> NetworkChoice:
    """Towards the first endpoint that has a name and a route to it."""
    first_error: HostError | None = None
    # Where all are on one machine, variables are about other networks.
    environ = {} if is_loopback(rendezvous.endpoints[0].host) else os.environ
    for endpoint in rendezvous.endpoints:
        try:
            return _towards(endpoint.host, environ, rendezvous.local_addr)
        except HostError as error:
            # An unknown name may be known later: that counts more than what will not change.
            if first_error is None or isinstance(error, UnknownHostError):
                first_error = error
    assert first_error is not None
    raise first_error


def _towards(host: str, environ: Mapping[str, str], local_addr: str | None) -> NetworkChoice:
    is_remote = not is_loopback(host)
    try:
        return choose_network([host], environ, local_addr=local_addr, has_remote_peers=is_remote)
    except UnknownHostError:
        if local_addr is None and is_own_name(host):  # others know it, sooner or later
            return choose_network([], environ, has_remote_peers=True)
        raise


def _is_here(endpoint: Endpoint, rendezvous: Rendezvous) -> bool:
    try:
        return is_here(endpoint.host, rendezvous.local_addr)
    except UnknownHostError:
        if len(rendezvous.endpoints) == 1:
            raise
        return False  # a machine that is down may have no name


def _listen(host: str, port: int, *, is_ours: bool) -> socket.socket | None:
    """The endpoint's listener; None if another agent of this machine already has it."""
    deadline = time.monotonic() + _BINDING_S
    while True:
        try:
            return listen(host, port)
        except HostError:
            if not is_ours and _answers(host, port):
                return None
            # One that began just now has the port for a moment before it listens there.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _answers(host: str, port: int) -> bool:
    """Whether something listens at this port of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return probe.connect_ex((host, port)) == 0


class ElasticRounds(LinkedRounds):
    """One agent's part in a job that no single agent can end by dying.

    Args:
        listener: at the address and port that `setup.me` names; owned by this object.
        is_verbose: print the reason of each decision.
        keeper: which decides who coordinates; None: the agents do.
        store_address: where workers' stores listen.
        speak: prints a message for the user.
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
        store_address: str = ANY,
        speak: Callable[[str], None] = say,
    ) -> None:
        super().__init__(
            setup,
            PeerRegister if keeper is None else keeper.register,
            listener,
            token,
            stalled_s=_STALLED * setup.timeouts.silence_s,
            is_verbose=is_verbose,
            speak=speak,
        )
        self._keeper = keeper
        self._store_address = store_address
        agreed_s = min(math.ceil(setup.timeouts.silence_s), MOST_SILENCE_S)
        self.silence_s = max(agreed_s, read_silence(os.environ))
        self._stores: dict[int, StoreHost] = {}  # by round
        self._unanswered_calls: Counter[Endpoint] = Counter()

    # RoundSource.

    def tick(self) -> None:
        self._take_answers()
        super().tick()

    def settle(self) -> None:
        """See RoundSource. Closes old stores."""
        newest = self._core.follower.last_round
        for number in [each for each in self._stores if each < newest]:
            self._stores.pop(number).close()

    def close(self) -> None:
        super().close()
        if self._keeper is not None:
            self._keeper.close()
        for store in self._stores.values():
            store.close()

    # For a program that is a node by itself.

    @property
    def waiting(self) -> int:
        """How many nodes wait for the next round."""
        return self._core.follower.waiting

    @property
    def is_stopping(self) -> bool:
        """Whether the latest round is being ended, on whichever nodes it runs."""
        return self._core.follower.is_stopping

    @property
    def missing(self) -> str:
        """What is missing for a round, as far as known; empty if it can only be left."""
        if self.is_stopping:
            return ""
        least = self._setup.limits.min_nodes
        return self._core.missing or self.news or f"fewer than {least} nodes have joined"

    @property
    def is_led(self) -> bool:
        """Whether there is a coordinator to report to."""
        return self._core.part in (Part.FOLLOWING, Part.LEADING)

    @property
    def is_at_endpoint(self) -> bool:
        """Whether newcomers call this agent."""
        return self._setup.slot is not None

    # Receiver.

    def gone(self, key: str, why: str) -> None:
        if self._keeper is not None:
            self._keeper.lost(key)
        super().gone(key, why)

    # How agents find each other.

    def _joined_late(self, key: str, join: Join) -> None:
        if self.tells_late_comers and self._finish and not refusal_reason(self._setup, join):
            self._connections.send(key, None, encode(Over(finish=self._finish)))

    def _not_found(self, at: Endpoint, why: str) -> None:
        self._report_other_program(at, why)
        super()._not_found(at, why)

    def _report_other_program(self, at: Endpoint, why: str) -> None:
        """A program at a local endpoint does not answer as an agent: report which.

        Not at the first time: an agent that starts or ends can briefly look the same.
        """
        is_here = is_loopback(at.host) or at.host in (self._setup.me.address, os.uname().nodename)
        self._unanswered_calls[at] += 1
        if not is_here or self._unanswered_calls[at] != _REPORTED_CALL:
            return
        from rallypoint.store.port_holder import holder_of

        holder = holder_of(at.port)
        if holder.startswith("process"):  # else nothing listens there
            self._say(
                f"the endpoint {at} is held by {holder}, which does not answer as an agent of "
                f"this job ({why}); end that process, or choose another --rdzv-endpoint."
            )

    # The keeper.

    def _watch(self, selector: selectors.BaseSelector) -> None:
        super()._watch(selector)
        if self._keeper is not None:
            selector.register(self._keeper, selectors.EVENT_READ, self._take_answers)

    def _send(self, to: str, at: Endpoint | None, message: Message) -> None:
        if to == KEEPER and self._keeper is not None:
            self._keeper.send(message)
        else:
            super()._send(to, at, message)

    def _call(self, at: Endpoint, message: Message) -> None:
        if self._keeper is not None:
            self._keeper.send(message)
        else:
            super()._call(at, message)

    def _examine_start(self) -> str:
        """Where a keeper listens, no agent is expected to."""
        return "" if self._keeper is not None else super()._examine_start()

    def _take_answers(self) -> None:
        for answer in [] if self._keeper is None else self._keeper.take():
            self._happened(partial(self._answered, answer))

    def _answered(self, answer: Message | str, now: float) -> Decision[Action]:
        if isinstance(answer, str):
            self.news = answer
            endpoints = self._setup.endpoints
            return self._core.unreachable(endpoints[0], answer, now) if endpoints else NOTHING
        return self._core.received(KEEPER, answer, now)

    # The workers' store.

    def _open_store(self, number: int, members: tuple[Member, ...]) -> Endpoint:
        """On a fresh port in each round, only for its members."""
        if number in self._stores:
            self._stores.pop(number).close()
        are_all_here = all(is_loopback(member.address) for member in members)
        store = self._stores[number] = StoreHost(self._store_address, silence_s=self.silence_s)
        store.serve(None if are_all_here else addresses_of_members(members))
        return Endpoint(host=self._setup.me.address, port=store.port)
