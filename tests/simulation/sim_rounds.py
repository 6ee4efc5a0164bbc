"""Where simulated agents get their rounds from: the real sources, over simulated connections.

    ELASTIC   ElasticRounds: nodes that come and go, with agents' votes, or a keeper's
    STATIC    StaticHost and StaticGuest: nodes that are known from the start; LocalRounds: one
    PLUG_IN   PlugInRounds: a package's rendezvous, which the agent asks in a thread

A thread of an agent is a real one, which runs while the simulation waits for it (`SimThread`).
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import selectors
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from tests.simulation.sim_clock import SimClock
from tests.simulation.sim_keeper import SimKeeper

from rallypoint.base.errors import RendezvousClosedError, StoreConnectionError
from rallypoint.base.inbox import Inbox
from rallypoint.launch.job import Job, Nodes, Rendezvous
from rallypoint.launch.rounds import plug_in, static_rounds
from rallypoint.launch.rounds.elastic import ElasticRounds
from rallypoint.launch.rounds.linked import LinkedRounds
from rallypoint.launch.rounds.plug_in import PlugInRounds
from rallypoint.launch.rounds.source import LocalRounds
from rallypoint.launch.rounds.static_rounds import StaticGuest, StaticHost, _StaticRounds
from rallypoint.rendezvous.api.rendezvous_handler import RendezvousHandler, RendezvousInfo
from rallypoint.rendezvous.consensus.messages import Message, Setup
from rallypoint.rendezvous.consensus.participant import Participant
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.reports import Order
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.keyvalue.key_value_register import KeyValueRegister
from rallypoint.rendezvous.keyvalue.key_value_voter import Answer

if TYPE_CHECKING:
    from tests.simulation.sim_driver import SimNode

BREAKS_AFTER_S = 6.0  # of static_rounds.py: a connection that nothing gets through
FORGETS_AFTER_S = 5.0  # a package's rendezvous, about a node that is gone
_PORT = 29400
_POLL_S = 0.1
_LAST_CALL_S = 0.5


class Kind(Enum):
    """Which source all nodes of a job use."""

    ELASTIC = "elastic"
    STATIC = "static"
    PLUG_IN = "plug-in"


class Readable:
    """Something readable for a selector."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def fill(self) -> None:
        os.eventfd_write(self._fd, 1)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class SimBoard(Readable):
    """The connections of one agent: PeerConnections' interface."""

    wake_at = None

    def __init__(self, node: SimNode) -> None:
        super().__init__()
        self._node = node
        self._events: list[Callable[[], None]] = []

    def send(self, to: str, at: Endpoint | None, payload: bytes) -> None:
        self._node.job.network.send(self._node, to, at, cast(Message, payload))

    def call(self, at: Endpoint, payload: bytes) -> None:
        self._node.job.network.call(self._node, at, cast(Message, payload))

    def came(self, event: Callable[[], None]) -> None:
        self._events.append(event)
        self.fill()
        self._node.turn_soon()

    def poll(self) -> None:
        if not self._events:
            return
        self.drain()
        events, self._events = self._events, []
        for event in events:
            event()


class SimKeeperEnd(Readable):
    """One agent's connection to the keeper: KeyValueLink's interface."""

    register = KeyValueRegister

    def __init__(self, node: SimNode, keeper: SimKeeper, setup: Setup) -> None:
        super().__init__()
        self._node = node
        self._answers: list[Answer] = []
        self._link = keeper.link(setup, SimClock(node.job.loop), self._answered)
        self.send, self.lost = self._link.send, self._link.lost

    def take(self) -> list[Answer]:
        self.drain()
        answers, self._answers = self._answers, []
        return answers

    def close(self, *_: object) -> None:
        self._link.close()
        super().close()

    def _answered(self, answers: list[Answer]) -> None:
        if self.fileno() >= 0:
            self._answers += answers
            self.fill()
            self._node.turn_soon()


class SimRounds(ElasticRounds):
    """Over simulated connections."""

    def __init__(self, node: SimNode, setup: Setup) -> None:
        keeper = node.job.keeper
        self.keeper = None if keeper is None else SimKeeperEnd(node, keeper, setup)
        super().__init__(
            setup,
            cast(Any, None),
            b"",
            is_verbose=True,
            keeper=cast(Any, self.keeper),
            speak=node.say,
        )
        self._connections.close(0.0)
        self._connections = cast(Any, SimBoard(node))
        self.board = cast(SimBoard, self._connections)
        self._node = node

    def _new_core(self) -> Participant:
        return Participant(self._register(self._setup), Random(self._setup.me.key))

    def open(self, selector: selectors.BaseSelector) -> None:
        super().open(selector)
        self._examine_at = math.inf  # with threads, for this machine's network

    def _open_store(self, number: int, members: tuple[Member, ...]) -> Endpoint:
        return self._node.new_store()


class SimStaticRounds(_StaticRounds):
    """One of these nodes, over simulated connections."""

    def _connect(self, node: SimNode, spec: Job) -> None:
        """In place of the constructors, which open sockets."""
        _StaticRounds.__init__(self, spec, None)
        self.node, self.keeper = node, None
        me = self._setup.me.__replace__(key=node.key)
        self.key, self._setup = node.key, self._setup.__replace__(me=me)
        self._core = self._new_core()
        self._say = node.say
        self._connections.close(0.0)
        self._connections = cast(Any, SimBoard(node))
        self.board = cast(SimBoard, self._connections)

    def _new_core(self) -> Participant:
        return Participant(self._register(self._setup), Random(self._setup.me.key))

    def open(self, selector: selectors.BaseSelector) -> None:
        LinkedRounds.open(self, selector)
        self._examine_at = math.inf  # with threads, for this machine's network


class SimStaticHost(SimStaticRounds, StaticHost):
    """Node 0; its stores have ports of their own, by which the simulation knows them."""

    def __init__(self, node: SimNode, spec: Job) -> None:
        self.has_first_store = True
        self._connect(node, spec)

    def _open_store(self, number: int, members: tuple[Member, ...]) -> Endpoint:
        self.has_first_store = False
        return self.node.new_store()


class SimStaticGuest(SimStaticRounds, StaticGuest):
    """Any other node."""

    def __init__(self, node: SimNode, spec: Job) -> None:
        self._agent = self._silent_agent = self._ask_at = None
        self._began = self._notice_at = 0.0
        self._connect(node, spec)

    def _ask(self) -> Endpoint:
        host = self.node.job.nodes[0]
        if (
            not host.is_alive
            or host.is_frozen
            or not self.node.job.reaches(host.name, self.node.name)
        ):
            raise StoreConnectionError("it does not answer")
        if not cast(SimStaticHost, host.rounds).has_first_store:
            raise StoreConnectionError("a job that has already begun with other nodes")
        return host.at


class SimLocalRounds(LocalRounds):
    """A job of one node."""

    board = keeper = None

    def __init__(self, node: SimNode, spec: Job) -> None:
        super().__init__(spec)
        self._node = node

    def _open_store(self) -> Endpoint:
        return self._node.new_store()


# A package's rendezvous.


class SimThread(threading.Thread):
    """In place of a thread of `node`: it runs while the simulation waits for it, until it parks."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        super().__init__(target=target, daemon=True)
        self.node: SimNode = cast(Any, target).__self__.node
        self._goes_on, self._has_parked = threading.Semaphore(0), threading.Semaphore(0)
        self._parked = 0  # how often so far
        self.items: deque[object] | None = None  # what it waits for, if for a queue
        self._is_abandoned = False

    def run(self) -> None:
        self._goes_on.acquire()
        try:
            if not self._is_abandoned:
                with contextlib.suppress(SystemExit):
                    super().run()
        finally:
            self._parked += 1
            self._has_parked.release()

    def start(self) -> None:
        super().start()
        self.node.job.loop.after(0.0, self.wake)

    def park(self, until: float) -> None:
        """Let time pass; only in that thread."""
        self._parked += 1
        self.node.job.loop.at(until, partial(self.wake, self._parked))
        self._has_parked.release()
        self._goes_on.acquire()
        if self._is_abandoned:
            raise SystemExit

    def wake(self, parked: int = 0) -> None:
        """It is to run, unless it has since it parked for that time."""
        if self._parked != parked or self._is_abandoned:
            return
        if self.node.is_frozen:
            self.node.job.loop.after(_POLL_S, partial(self.wake, parked))
            return
        self._goes_on.release()
        self._has_parked.acquire()

    def came(self) -> None:
        """There is something in its queue."""
        if self.items is not None:
            self.node.job.loop.after(0.0005, partial(self.wake, self._parked))

    def join(self, timeout: float | None = None) -> None:
        """Let it work off its queue; it is not waited for in anything else."""
        while self.items and self.is_alive():
            self.wake(self._parked)

    def abandon(self) -> None:
        """Its process has ended."""
        if not self._is_abandoned:
            self._is_abandoned = True
            self._goes_on.release()
            super().join()


def _this_thread() -> SimThread:
    return cast(SimThread, threading.current_thread())


class SimQueue:
    """A queue that one such thread reads: SimpleQueue's interface."""

    def __init__(self) -> None:
        self._items: deque[object] = deque()
        self._reader: SimThread | None = None

    def put(self, item: object) -> None:
        self._items.append(item)
        if self._reader is not None:
            self._reader.came()

    def get(self, timeout: float) -> object:
        self._reader = thread = _this_thread()
        if not self._items:
            thread.items = self._items
            thread.park(thread.node.job.loop.now + timeout)
            thread.items = None
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class _PlugInTime:
    """The module `time` of plug_in.py: sleeping lets time pass."""

    @staticmethod
    def sleep(seconds: float) -> None:
        thread = _this_thread()
        thread.park(thread.node.job.loop.now + seconds)


class SimStore:
    """The keys and values of one round."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}

    def set(self, key: str, value: object) -> None:
        self._values[key] = value

    def get(self, key: str) -> object:
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


class SimMeeting:
    """What a package's rendezvous knows of a job, by the rules of torch's dynamic rendezvous."""

    def __init__(self, min_nodes: int, max_nodes: int) -> None:
        self.is_closed = False
        self.members: dict[str, int] = {}  # the ranks of those of the round that have not left it
        self.waiting: list[str] = []
        self.store = SimStore()
        self._min, self._max = min_nodes, max_nodes
        self._size = 0
        self._enough_since = math.inf

    def leave(self, key: str) -> None:
        self.members.pop(key, None)
        if key in self.waiting:
            self.waiting.remove(key)

    def join(self, key: str, now: float) -> RendezvousInfo | None:
        """Its place, once there is one."""
        if key not in self.waiting and key not in self.members:
            self.waiting.append(key)
        count = len(self.waiting)
        self._enough_since = min(self._enough_since, now) if count >= self._min else math.inf
        is_due = count >= self._max or now >= self._enough_since + _LAST_CALL_S
        if not self.members and count >= self._min and is_due:
            chosen, self.waiting = self.waiting[: self._max], self.waiting[self._max :]
            self.members = {each: rank for rank, each in enumerate(sorted(chosen))}
            self._size, self.store, self._enough_since = len(chosen), SimStore(), math.inf
        if key not in self.members:
            return None
        return RendezvousInfo(cast(Any, self.store), self.members[key], self._size)


class SimHandler(RendezvousHandler):
    """One node's part in it."""

    def __init__(self, node: SimNode) -> None:
        self._node, self._key, self._meeting = node, node.key, node.job.meeting

    def get_backend(self) -> str:
        return "sim"

    def get_run_id(self) -> str:
        return "job"

    def next_rendezvous(self) -> RendezvousInfo:
        loop = self._node.job.loop
        self._meeting.leave(self._key)
        while not self._meeting.is_closed:
            info = self._meeting.join(self._key, loop.now)
            if info is not None:
                return info
            _this_thread().park(loop.now + _POLL_S)
        raise RendezvousClosedError("the rendezvous is closed")

    def is_closed(self) -> bool:
        return self._meeting.is_closed

    def set_closed(self) -> None:
        self._meeting.is_closed = True

    def num_nodes_waiting(self) -> int:
        return len(self._meeting.waiting) if self._meeting.members else 0

    def shutdown(self) -> bool:
        self.set_closed()
        return True


class _SimInbox(Inbox):  # type: ignore[type-arg]  # without typing, it takes no parameters
    """Of an agent that looks into it in its next turn."""

    def __init__(self, node: SimNode) -> None:
        super().__init__()
        self._node = node

    def put(self, item: Order) -> None:
        super().put(item)
        self._node.turn_soon()


class SimPlugInRounds(PlugInRounds):
    """One agent's side of it."""

    board = keeper = None

    def __init__(self, node: SimNode, spec: Job) -> None:
        self.node = node
        member = spec.member.__replace__(
            key=node.key, wish=None, address=node.address, addresses=()
        )
        super().__init__(SimHandler(node), member, spec.max_restarts)
        self._posted = _SimInbox(node)

    def forget(self) -> None:
        """Its process has ended."""
        cast(SimThread, self._thread).abandon()
        self._posted.close()

    def _open_store(self, info: RendezvousInfo) -> Endpoint:
        return self.node.new_store()


SimSource = SimRounds | SimStaticRounds | SimLocalRounds | SimPlugInRounds


@contextlib.contextmanager
def without_network() -> Iterator[None]:
    """Let sources find nothing of this machine, and have simulated threads."""
    with contextlib.ExitStack() as patches:
        for module, name, otherwise in (
            (static_rounds, "say", lambda _: None),
            (static_rounds, "_choose", lambda _: None),
            (static_rounds, "own_addresses", tuple),
            (plug_in, "threading", SimpleNamespace(Thread=SimThread)),
            (plug_in, "queue", SimpleNamespace(SimpleQueue=SimQueue, Empty=queue.Empty)),
            (plug_in, "time", _PlugInTime),
        ):
            patches.enter_context(mock.patch.object(module, name, otherwise))
        yield


def place_of(node: SimNode) -> dict[str, Any]:
    """What a job's description says of its nodes, on one of them."""
    job, count = node.job, len(node.job.nodes)
    if job.kind is Kind.STATIC:
        first = job.nodes[0].address
        nodes = Nodes(count=count, node_rank=node.number, master_addr=first, master_port=_PORT)
        return {"nodes": nodes}
    return {
        "rendezvous": Rendezvous(
            backend="c10d" if job.kind is Kind.ELASTIC else "sim",
            endpoints=job.endpoints,
            run_id="job",
            min_nodes=job.min_nodes,
            max_nodes=count,
        )
    }


def rounds_of(node: SimNode, spec: Job) -> SimSource:
    """The source for a node's new agent."""
    if node.job.kind is Kind.PLUG_IN:
        return SimPlugInRounds(node, spec)
    if node.job.kind is Kind.ELASTIC:
        return SimRounds(node, _elastic_setup(node))
    if len(node.job.nodes) == 1:
        return SimLocalRounds(node, spec)
    return SimStaticGuest(node, spec) if node.number else SimStaticHost(node, spec)


def _elastic_setup(node: SimNode) -> Setup:
    job = node.job
    slot = node.number if not job.keeper and node.number < len(job.endpoints) else None
    me = Member(
        key=node.key,
        host=node.name,
        local_world_size=job.workers,
        address=node.address,
        port=node.at.port,
    )
    limits = Limits(
        min_nodes=job.min_nodes, max_nodes=len(job.nodes), join_timeout_s=600.0, last_call_s=0.5
    )
    return Setup(
        me=me,
        run_id="job",
        limits=limits,
        endpoints=job.endpoints,
        slot=slot,
        max_restarts=job.restarts,
        timeouts=job.timeouts,
    )
