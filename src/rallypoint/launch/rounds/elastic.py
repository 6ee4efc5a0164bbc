"""Nodes that find each other and may come and go (--rdzv-backend c10d, etcd).

All agents are equal, and the job survives any of them: rendezvous/consensus decides, linked.py
performs. This module defines how the agents find each other, and where each round's store is. Where
a keeper such as etcd holds the agreements, it decides who coordinates; all else is the same.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from rallypoint.base.address import is_loopback
from rallypoint.base.worker_env import MOST_SILENCE_S, read_silence
from rallypoint.cluster.interface import own_addresses
from rallypoint.launch.job import Job, Rendezvous, Verbosity
from rallypoint.launch.output.terminal import say
from rallypoint.launch.rounds.linked import LinkedRounds, lease_time
from rallypoint.launch.rounds.network_place import NetworkPlace, find_place
from rallypoint.launch.rounds.store_host import ANY, StoreHost, addresses_of_members
from rallypoint.rendezvous.consensus.messages import Action, Message, Over, Setup
from rallypoint.rendezvous.consensus.participant import Part
from rallypoint.rendezvous.consensus.peers import refusal_reason
from rallypoint.rendezvous.consensus.register import PeerRegister
from rallypoint.rendezvous.consensus.rules import KEEPER
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


def rounds_of(job: Job, rendezvous: Rendezvous) -> ElasticRounds:
    """The rounds that this job's agent takes part in."""
    configuration = rendezvous.configuration
    timeouts = read_timeouts(configuration, rendezvous.backend)
    warn_without_token(rendezvous)
    is_etcd = rendezvous.backend == "etcd"
    place = find_place(
        rendezvous,
        is_host=False if is_etcd else read_is_host(configuration),
        wait_s=timeouts.join_timeout_s,
        to_find_out=job.to_find_out,
    )
    setup = setup_of(job, rendezvous, timeouts, place, attempt=read_attempt(os.environ))
    rounds = ElasticRounds(
        setup,
        place.listener,
        rendezvous.token or b"",
        is_verbose=job.verbosity is Verbosity.VERBOSE,
        keeper=_etcd(setup, configuration) if is_etcd else None,
        place=place.stores_at,
    )
    rounds.network = place.choice
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
    job: Job,
    rendezvous: Rendezvous,
    timeouts: Timeouts,
    place: NetworkPlace,
    *,
    attempt: int,
) -> Setup:
    """This agent's initial state, in that place."""
    at = place.at
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
        slot=place.slot,
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


class ElasticRounds(LinkedRounds):
    """One agent's part in a job that no single agent can end by dying.

    Args:
        listener: at the address and port that `setup.me` names; owned by this object.
        is_verbose: print the reason of each decision.
        keeper: which decides who coordinates; None: the agents do.
        place: where workers' stores listen.
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
        place: str = ANY,
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
        self._place = place
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
        if holder.startswith("process"):  # else nobody listens there
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

    def _take_answers(self) -> None:
        for answer in [] if self._keeper is None else self._keeper.take():
            self._happened(partial(self._answered, answer))

    def _answered(self, answer: Message | str, now: float) -> Decision[Action]:
        if isinstance(answer, str):
            self.news = answer
            places = self._setup.endpoints
            return self._core.unreachable(places[0], answer, now) if places else NOTHING
        return self._core.received(KEEPER, answer, now)

    # The workers' store.

    def _open_store(self, number: int, members: tuple[Member, ...]) -> Endpoint:
        """On a fresh port in each round, only for its members."""
        if number in self._stores:
            self._stores.pop(number).close()
        are_all_here = all(is_loopback(member.address) for member in members)
        store = self._stores[number] = StoreHost(self._place, silence_s=self.silence_s)
        store.serve(None if are_all_here else addresses_of_members(members))
        return Endpoint(host=self._setup.me.address, port=store.port)
