"""A Python program as one node of an elastic job: it has an agent's rounds, and no workers.

    the program's threads, in a NodeHandler <--condition--> ProgramNode <--> the other nodes

The node sends heartbeats while the program works. Where an agent would end its workers, the program
learns that the round was stopped; where an agent would report their end, the program asks for
another round. Leaders and rounds are decided in the same code as for agents.
"""

from __future__ import annotations

import selectors
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable

from rallypoint.base.errors import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from rallypoint.base.inbox import Inbox
from rallypoint.base.ready import call_ready, earliest, left_until
from rallypoint.launch.rounds.elastic import ElasticRounds
from rallypoint.rendezvous.api.rendezvous_handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeout,
)
from rallypoint.rendezvous.job.reports import Finish, NodeReport, Outcome, Start, Stop, assert_never
from rallypoint.rendezvous.job.round import Seat

CLOSED = "the rendezvous was closed by "
_CAME_BACK = "asked for a new round"
_GOODBYE_S = 2.0  # to notify the others
_LOOK_EVERY_S = 0.1  # interval of checks for missing members


class ProgramNode:
    """One life of a node: a thread, and its state. A node wants a round from its start.

    Attributes:
        changed: guards the others; notified when one of them changes.
        round: the latest one in which the program took its seat; -1: none yet.
        seat: in the latest round; None: none yet.
        stopped: why that round is over, if it is.
        finish: how the job ended for this node.
        closed: why there is no further round, if there is none.
        error: what ended the thread, other than an order.
        missing: which nodes are present and missing, while there are too few, if known.
    """

    def __init__(self, rounds: ElasticRounds, name: str) -> None:
        self.changed = threading.Condition()
        self.round = -1
        self.seat: Seat | None = None
        self.stopped = self.closed = self.missing = ""
        self.finish: Finish | None = None
        self.error: Exception | None = None
        self._wants = True  # it wants a round
        self._thread = threading.Thread(target=self._run, name=f"rendezvous {name}", daemon=True)
        self._rounds = rounds
        rounds.tells_late_comers = True
        self._name = name
        self._ended = -1  # the newest round whose end was reported
        self._calls: Inbox[Callable[[], None]] = Inbox()
        self._report = NodeReport()
        self._last_word: dict[str, str] | None = None  # to be sent once a node can receive it
        self._has_said_it = False
        self._end_at: float | None = None
        self._looked_at = 0.0

    def start(self) -> None:
        """Take part from now on."""
        self._thread.start()

    # With `changed` held.

    @property
    def has_ended(self) -> bool:
        """Whether the latest round is over for this node."""
        return bool(self.stopped or self.finish or self.error)

    @property
    def waiting(self) -> int:
        """How many nodes wait, at least 1, if `round` is over; otherwise 0. As last reported."""
        return max(1, self._rounds.waiting) if self.has_ended and not self.closed else 0

    @property
    def is_spare(self) -> bool:
        """Whether it waits for a place in a round that runs without it."""
        rounds = self._rounds
        return self._wants and self.seat is None and rounds.waiting > 0 and not rounds.is_stopping

    def take_seat(self) -> Seat | None:
        """This node's seat in a round newer than `round`, if one runs."""
        if self.seat is None or self.seat.number <= self.round or self.stopped:
            return None
        self._wants = False
        self.round = self.seat.number
        return self.seat

    # Without the lock, for the program's threads.

    def want_round(self) -> None:
        """Leave `round`, if it is not over, and wait for the next one."""
        self._calls.put(self._leave_round)

    def close(self) -> None:
        """End the rendezvous for all."""
        self._calls.put(lambda: self._say_last(stop_asked=f"{CLOSED}{self._name}"))

    def withdraw(self) -> None:
        """Stop taking part at once; the others continue."""
        self._calls.put(lambda: self._say_last(leaves="it waited too long"))
        self.end()

    def end(self) -> None:
        """End the thread soon, once earlier requests are carried out.

        It never waits, as it is called when the handler is collected.
        """
        self._calls.put(self._end)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; returns whether it ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        try:
            self._live()
        except Exception as error:  # reported to the waiting thread
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _live(self) -> None:
        """Take part until `end`, or until the job is over; then free all resources."""
        selector = selectors.DefaultSelector()
        selector.register(self._calls, selectors.EVENT_READ, self._hear)
        try:
            self._rounds.open(selector)
            while not self._is_over():
                call_ready(selector, left_until(earliest(self._rounds.wake_at, self._end_at)))
                alarm = self._rounds.wake_at
                if alarm is not None and time.monotonic() >= alarm:
                    self._rounds.tick()
        finally:
            self._rounds.close()
            selector.close()
            self._calls.close()

    def _hear(self) -> None:
        for call in self._calls.take():
            call()

    def _is_over(self) -> bool:
        self._obey()
        now = time.monotonic()
        if self._wants and now >= self._looked_at + _LOOK_EVERY_S:
            self.missing, self._looked_at = self._rounds.missing, now
        if self._last_word is not None and self._rounds.is_led:
            word, self._last_word = self._last_word, None
            self._has_said_it = True
            self._tell(**word)
            self._obey()
        if self.finish is not None:
            # The node at the endpoint notifies late joiners that they are late.
            return self._end_at is not None or not self._rounds.is_at_endpoint
        if self._end_at is None:
            return False
        return not self._has_said_it or time.monotonic() >= self._end_at

    def _obey(self) -> None:
        orders, self._rounds.orders = self._rounds.orders, []
        for order in orders:
            with self.changed:
                match order:
                    case Start(seat=seat):
                        self.seat, self.stopped = seat, ""
                        self._rounds.settle()
                    case Stop():
                        self._stop(order)
                    case Finish():
                        self.finish = order
                        if order.outcome is not Outcome.GIVEN_UP and not order.was_cut_off:
                            self.closed = order.because
                    case _:
                        assert_never(order)
                self.changed.notify_all()

    def _stop(self, stop: Stop) -> None:
        self.stopped = stop.because
        if stop.because.startswith(CLOSED):
            self.closed = stop.because
        # Nothing comes after the end, and what this node has not begun needs no end.
        if self.closed or self._wants:
            self._report_end(stop.round)

    def _leave_round(self) -> None:
        with self.changed:
            self._wants = True
            seat, self.stopped = self.seat, self.stopped or _CAME_BACK
        if seat is not None:
            self._report_end(seat.number)

    def _report_end(self, number: int) -> None:
        if number > self._ended:
            self._ended = number
            # A node without workers ends a round by wanting another one.
            self._tell(round=number, has_begun=True, was_cut_off=True, because=_CAME_BACK)

    def _tell(self, **news: object) -> None:
        self._report = self._report.__replace__(**news)
        if self.finish is None:
            self._rounds.tell(self._report)

    def _say_last(self, **word: str) -> None:
        self._last_word = word

    def _end(self) -> None:
        self._end_at = time.monotonic() + _GOODBYE_S


class NodeHandler(RendezvousHandler):
    """One node's handler: what the program waits for, for how long, and which errors it gets.

    What a seat gives access to, and how a rendezvous is closed, differs: handler.py,
    store_handler.py. The node's thread ends when its handler is no longer referenced.
    """

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
        self._node = None
        node.withdraw()
        node.join(self._close_s)
        raise RendezvousTimeoutError(
            f"no round of {self._run_id!r} began within {self._join_s:g} s: {missing}; check the "
            "other nodes, or allow more time with join_timeout."
        )
