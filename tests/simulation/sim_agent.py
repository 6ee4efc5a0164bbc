"""One simulated agent: its real decisions, carried out on a simulated network with simulated
workers.

Workers end late when asked to, and at the last moment when forced. The process may die between any
two actions of one decision. It may also be stopped: then everything that it would receive waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.sim_clock import SimClock
from tests.simulation.sim_keeper import SimLink
from tests.simulation.sim_network import Process

from rallypoint.rendezvous.consensus.messages import (
    Action,
    Call,
    Message,
    OpenStore,
    SendMessage,
    Setup,
)
from rallypoint.rendezvous.consensus.participant import Part, Participant
from rallypoint.rendezvous.consensus.rules import KEEPER
from rallypoint.rendezvous.job.reports import (
    Decision,
    Ending,
    Finish,
    NodeReport,
    Notice,
    RankFailure,
    Start,
    Stop,
)
from rallypoint.rendezvous.job.round import Endpoint, Seat
from rallypoint.rendezvous.keyvalue.key_value_register import KeyValueRules
from rallypoint.rendezvous.keyvalue.key_value_voter import Answer

if TYPE_CHECKING:
    from tests.simulation.sim_cluster import SimCluster

_TIMER_S = 0.001  # no timer is finer


class SimAgent(Process):
    """One agent process and its workers.

    Attributes:
        keeps: its workers can go on when others are lost.
    """

    def __init__(self, cluster: SimCluster, name: str, key: str, setup: Setup) -> None:
        self.name, self.key, self.host = name, key, name
        self.at = Endpoint(host=setup.me.address, port=setup.me.port)
        self.is_alive = True
        self.seat: Seat | None = None
        self.finish: Finish | None = None
        self.core = Participant(cluster.register(setup), Random(cluster.random.random()))
        self.clock = SimClock(
            cluster.loop,
            offset_s=cluster.random.uniform(0, 1000),
            speed=1 + cluster.random.uniform(-0.5, 0.5) * setup.drift,
        )
        self.dies_after: int | None = None  # after so many more actions
        self.job = ""
        self.keeper: SimLink | None = None
        if cluster.keeper is not None:
            rules = cluster.rules if issubclass(cluster.rules, KeyValueRules) else KeyValueRules
            self.keeper = cluster.keeper.link(setup, self.clock, self._hear_keeper, rules)
        self._cluster = cluster
        self._alarm = float("inf")
        self._stopping = False
        self.keeps = cluster.other_random.random() < 0.5
        self._kept: Seat | None = None
        self._report = NodeReport()
        self.told_ended: set[str] = set()  # other agents
        self._is_stopped = False
        self._unheard: deque[Callable[[], object]] = deque()

    # SIGSTOP and SIGCONT.

    def stop(self) -> None:
        """Stop its process until `go_on`; its workers run, and its connections stay open."""
        self._is_stopped = True

    def go_on(self) -> None:
        """Let it continue, and receive all that has arrived meanwhile."""
        self._is_stopped = False
        while self._unheard and not self._is_stopped:
            self._unheard.popleft()()

    def _waits(self, what: Callable[[], object]) -> bool:
        """Whether the call must wait, because the process is stopped."""
        if self._is_stopped:
            self._unheard.append(what)
        return self._is_stopped

    # Calls from the network.

    def hear(self, sender: str, message: Message) -> None:
        if self.is_alive and not self._waits(lambda: self.hear(sender, message)):
            self.perform(self.core.received(sender, message, self.clock.now()))

    def hear_closed(self, key: str) -> None:
        if self.is_alive and not self._waits(lambda: self.hear_closed(key)):
            self.told_ended.add(key)
            if self.keeper is not None:
                self.keeper.lost(key)
            self.perform(self.core.closed(key, "its connection closed", self.clock.now()))

    def hear_unreachable(self, at: Endpoint) -> None:
        if self.is_alive and not self._waits(lambda: self.hear_unreachable(at)):
            self.perform(self.core.unreachable(at, "connection refused", self.clock.now()))

    def _hear_keeper(self, answers: list[Answer]) -> None:
        for answer in answers:
            if self.is_alive and isinstance(answer, str):
                for at in self.core.setup.endpoints:
                    self.perform(self.core.unreachable(at, answer, self.clock.now()))
            elif self.is_alive:
                self.hear(KEEPER, answer)  # type: ignore[arg-type]

    # Its actions.

    def perform(self, decision: Decision[Action]) -> None:
        """Carry out a decision, or die within it."""
        cluster = self._cluster
        if decision.reason:
            cluster.tell(f"{self.name} {self.core.part.value}: {decision.reason}")
        for action in decision.actions:
            if self.dies_after is not None:
                self.dies_after -= 1
                if self.dies_after < 0:
                    return cluster.kill_agent(self, "in the middle of a decision")
            match action:
                case SendMessage(to="keeper", message=message) | Call(message=message) if (
                    self.keeper
                ):
                    self.keeper.send(message)
                case SendMessage(to=to, at=at, message=message):
                    cluster.network.send(self, to, at, message)
                case Call(at=at, message=message):
                    cluster.network.call(self, at, message)
                case OpenStore(round=number):
                    self._open_store(number)
                case Start():
                    self._begin(action)
                case Stop():
                    self._stop(action)
                case Finish():
                    self.finish = action
                    self._end_by(0.1 if self.seat else 0.0)
                case Notice(text=text):
                    cluster.tell(f"{self.name} says: {text}")
        cluster.witness.look_at(self.key, self.core)
        self._set_alarm()
        return None

    def report(self, **news: object) -> None:
        """Learn of its workers, or of a signal."""
        if self.is_alive and not self._waits(lambda: self.report(**news)):
            self._report = self._report.__replace__(**news)
            self.perform(self.core.reported(self._report, self.clock.now()))

    def _open_store(self, number: int) -> None:
        def opened() -> None:
            if self.is_alive and not self._waits(opened):
                store = Endpoint(host=self.at.host, port=30000 + number)
                self.perform(self.core.store_opened(number, store, self.clock.now()))

        self._cluster.loop.after(self._cluster.random.uniform(0.0, 0.002), opened)

    def _begin(self, start: Start) -> None:
        seat, survivors = start.seat, self._report.survivors
        if self.seat is not None:
            self._cluster.witness.violated(f"{self.name} begins twice")
        is_short = self._kept is not None and start.keeps and survivors < seat.local_world_size
        self.seat, self._kept = seat, None
        self._stopping = False
        new = self._report.without(seat.number)
        self._report = new.__replace__(has_begun=True, is_over=False, survivors=0)
        self._cluster.begun(self, seat)
        if is_short:  # the coordinator did not yet know
            self._cluster.loop.after(0.0, self.fail)

    def fail(self) -> None:
        """Let a worker fail, and the others end; or one that waits for the next round."""
        seat = self.seat
        if self._kept is not None and self._report.survivors and self.is_alive:
            self._cluster.tell(f"{self.name}: a kept worker ends")
            return self.report(survivors=self._report.survivors - 1)
        if seat is None or self._stopping or not self.is_alive:
            return None
        self._stopping = True
        self._cluster.witness.failures.add(seat.number)
        self._cluster.tell(f"{self.name}: a worker fails")
        self.report(broken="rank failed")
        cause = RankFailure(rank=seat.first_rank, node_rank=seat.node_rank, text="rank failed")
        self._cluster.loop.after(0.05, lambda: self._end(seat, succeeded=False, causes=(cause,)))
        return None

    def succeed(self) -> None:
        """Let all workers succeed."""
        seat = self.seat
        if seat is not None and not self._stopping and self.is_alive:
            self._end(seat, succeeded=True)

    def leave(self) -> None:
        """Send the agent SIGTERM."""
        if not self.is_alive or self.core.part is Part.DONE:
            return
        self._cluster.tell(f"{self.name}: SIGTERM")
        self.report(leaves="SIGTERM stopped it")
        if self.seat is not None and not self._stopping:
            self._end_later(self.seat, self._cluster.random.uniform(0.01, 0.3))

    def end_job(self) -> None:
        """Press Ctrl-C."""
        if self.is_alive and self.core.part is not Part.DONE:
            self._cluster.tell(f"{self.name}: SIGINT")
            self.report(stop_asked="SIGINT stopped it")

    def _stop(self, stop: Stop) -> None:
        seat, may_pause = self.seat, stop.ending is Ending.PAUSE
        if seat is None or seat.number != stop.round:
            if self._kept is not None and self._kept.number == stop.round and not may_pause:
                self._end_kept(self._kept)
            return
        keeps = self.keeps and not self._stopping
        if may_pause or stop.ending is Ending.KILL:  # at most the time that an agent is allowed
            kill_s = self._cluster.kill_s * self._cluster.random.uniform(0.1, 0.95)
            self._end_later(seat, kill_s, keeps=keeps and may_pause)
        elif not self._stopping:
            grace_s = self._cluster.random.uniform(0.005, self._cluster.grace_s)
            self._end_later(seat, grace_s, keeps=keeps)

    def _end_later(self, seat: Seat, delay_s: float, *, keeps: bool = False) -> None:
        self._stopping = True
        self._cluster.loop.after(delay_s, lambda: self._end(seat, succeeded=False, keeps=keeps))

    def _end_kept(self, seat: Seat) -> None:
        def end() -> None:
            if self._kept is seat and self.is_alive:
                self._kept = None
                if seat.local_world_size:
                    self._cluster.tell(f"{self.name}: kept workers end")
                self.report(survivors=0, waits=False)

        self._cluster.loop.after(self._cluster.kill_s * self._cluster.other_random.random(), end)

    def _end(
        self,
        seat: Seat,
        *,
        succeeded: bool,
        causes: tuple[RankFailure, ...] = (),
        keeps: bool = False,
    ) -> None:
        if self.seat is not seat or not self.is_alive:
            return
        self.seat = None
        # Without a place in the round, it may have workers on standby all the same.
        self._kept = seat if keeps or not seat.local_world_size else None
        how = "kept" if keeps else "succeeded" if succeeded else "ended"
        self._cluster.ended(self, seat, how=how)
        self.report(
            is_over=True,
            succeeded=succeeded,
            causes=causes,
            survivors=seat.local_world_size if keeps else 0,
            waits=self._kept is not None,
        )

    def _end_by(self, delay_s: float) -> None:
        def end() -> None:
            if self.is_alive and not self._waits(end):
                self._cluster.exited(self)

        self._cluster.loop.after(delay_s, end)

    def start(self) -> None:
        """Start the process."""
        self.perform(self.core.started(self.clock.now()))

    def _set_alarm(self) -> None:
        wake_at = self.core.wake_at
        if wake_at is None or not self.is_alive:
            return
        when = max(self.clock.when(wake_at), self._cluster.loop.now + _TIMER_S)
        if when < self._alarm or self._alarm <= self._cluster.loop.now:
            self._alarm = when
            self._cluster.loop.at(when, lambda: self._ring(when))

    def _ring(self, when: float) -> None:
        if not self.is_alive or when != self._alarm or self._waits(lambda: self._ring(when)):
            return
        self._alarm = float("inf")
        now = self.clock.now()
        wake_at = self.core.wake_at
        if wake_at is not None and now < wake_at - 1e-9:
            return self._set_alarm()
        # Rounding must not stop time.
        self.perform(self.core.tick(max(now, wake_at or now)))
        return None
