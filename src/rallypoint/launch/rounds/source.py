"""What gives an agent its rounds (`RoundSource`), and that of a single node, which needs no others.

`RoundSource` is all that the agent needs: its orders define rounds (members, ranks, the store).
`LocalRounds` is for a job of one node, whose agent asks the coordinator directly; the other sources
have files beside this one. Nothing here blocks.
"""

from __future__ import annotations

import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from rallypoint.base.record import Record
from rallypoint.base.worker_env import SILENCE_S
from rallypoint.launch.job import Job, Verbosity
from rallypoint.launch.output.terminal import say
from rallypoint.launch.rounds.store_host import StoreHost
from rallypoint.rendezvous.job.coordinator import Coordinator, JobDecision, OpenRound
from rallypoint.rendezvous.job.reports import (
    Finish,
    NodeReport,
    Notice,
    Order,
    Refuse,
    Start,
    Stop,
    assert_never,
)
from rallypoint.rendezvous.job.round import Endpoint, seats_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.cluster.interface_choice import NetworkChoice


class AgentInfo(Record):
    """Another agent of the job, or this one.

    Attributes:
        size: the number of its workers in the round.
        silent_s: the time since its last message.
    """

    key: str
    node_rank: int
    host: str
    size: int
    silent_s: float


class Roster(Record, kw_only=True):
    """The agents of the job, as far as this agent knows.

    Attributes:
        me: this agent's key.
        leader: the coordinator; empty: none is known here.
        members: all agents; known only to the coordinator.
        why: what is waited for, if no agent coordinates.
    """

    me: str
    leader: str
    members: tuple[AgentInfo, ...] = ()
    why: str = ""


class RoundSource(ABC):
    """The agent's side of the agreement on rounds.

    Attributes:
        key: which member of a round this agent is.
        may_leave: whether the others continue when a signal stops this agent.
        keeps_survivors: whether workers that can continue when others are lost may do so.
        news: what is waited for while there is no round; empty: nothing is known.
        silence_s: another machine may be silent for this long before it counts as lost.
        network: the interface at which others reach this node; None: there are no others, or it is
            not known yet.
        inquired: called with another agent's key and the message of its `inquire`.
    """

    may_leave = False
    keeps_survivors = True
    news = ""
    silence_s = SILENCE_S
    network: NetworkChoice | None = None

    def __init__(self, key: str) -> None:
        self.key = key
        self.orders: list[Order] = []  # what the agent is to do next; it takes them away
        self.inquired: Callable[[str, bytes], None] | None = None

    @property
    def wake_at(self) -> float | None:
        """When to call `tick` at the latest; None: only events matter."""
        return None

    @property
    def fence_at(self) -> float | None:
        """Until when (lease_time) workers may run without messages from others; None: always.

        Afterwards the others may start again without this node.
        """
        return None

    @abstractmethod
    def open(self, selector: selectors.BaseSelector) -> None:
        """Begin; events are callbacks of the selector."""

    @abstractmethod
    def tell(self, report: NodeReport) -> None:
        """Tell the coordinator: all that is to be known of this node."""

    @abstractmethod
    def tick(self) -> None:
        """Time has passed."""

    def roster(self) -> Roster | None:
        """The other agents; None: there is none, or none that could be asked."""
        return None

    def inquire(self, key: str, payload: bytes) -> None:  # noqa: B027 - a lone agent has no other
        """Send a message to that agent; unrelated to rounds."""

    def fenced(self) -> None:  # noqa: B027 - most have no such time
        """The guardian has paused the workers, or is ending them, because that time is over."""

    def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """The workers have been started: do what could be postponed until then."""

    @abstractmethod
    def close(self) -> None:
        """The agent is ending."""


class LocalRounds(RoundSource):
    """The coordinator's own agent. It hosts the worker store, a new one for each round."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.member.key)
        self._job = job
        self._coordinator = Coordinator(job.limits, job.max_restarts)
        self._store: StoreHost | None = None
        self._old_store: StoreHost | None = None

    @property
    def wake_at(self) -> float | None:
        return self._coordinator.wake_at

    def open(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        self._perform(self._coordinator.opened(now))
        self._perform(self._coordinator.joined(self._job.member, now))

    def tell(self, report: NodeReport) -> None:
        self._perform(self._coordinator.reported(self.key, report, time.monotonic()))

    def tick(self) -> None:
        self._perform(self._coordinator.tick(time.monotonic()))

    def settle(self) -> None:
        """See RoundSource. The new store has its own port, so closing the old one can wait."""
        if self._old_store is not None:
            self._old_store.close()
            self._old_store = None
        if self._store is not None:
            self._store.serve()

    def close(self) -> None:
        for store in (self._old_store, self._store):
            if store is not None:
                store.close()

    def _perform(self, decision: JobDecision) -> None:
        if decision.reason and self._job.verbosity is Verbosity.VERBOSE:
            say(f"job {self._coordinator.stage.value}: {decision.reason}")
        for action in decision.actions:
            match action:
                case OpenRound():
                    store = self._open_store()
                    seats = seats_of(action.members, number=action.number, store=store)
                    start = Start(
                        seat=seats[self.key],
                        because=action.because,
                        is_urgent=action.is_urgent,
                        may_replace=action.may_replace,
                    )
                    self.orders.append(start)
                case Stop() | Finish():
                    self.orders.append(action)
                case Notice(text):
                    say(text)
                case Refuse():
                    pass  # these are for the agents of several nodes
                case _:
                    assert_never(action)

    def _open_store(self) -> Endpoint:
        port = self._job.nodes.master_port
        self._old_store, self._store = self._store, None
        if port:  # the same port: the old round's workers are known dead, its store can go
            self.settle()
        self._store = StoreHost(port=port)
        return self._store.endpoint
