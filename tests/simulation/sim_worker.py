"""Simulated workers: what a training under rallypoint.elastic says to its agent, and does with what
it hears, by the rules of rallypoint.elastic and process_group.formation.

Workers of a round form a group, agree on who has the state, and make steps, all or none. A step's
state is a hash of the one before and of who made it: there must be one for each step.
"""

from __future__ import annotations

import itertools
import signal
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from tests.simulation.sim_clock import SimLoop
from tests.simulation.sim_witness import ViolationError

from rallypoint.base.control_message import (
    MAX_MESSAGE_BYTES,
    CallTimedOut,
    Kept,
    Known,
    LostContact,
    Place,
    Released,
    Stage,
    WorkerError,
    WorkerReport,
    decode,
    encode,
    move,
)
from rallypoint.base.worker_env import STANDBY
from rallypoint.process_group.formation.own_place import ROUND

_EXITED, _KILLED = 1, 2  # CLD_
NEWS_S, REMEDY_S = 2.0, 30.0  # of own_place.py
TIMEOUT_S = 30.0  # of a call
SILENCE_S = 5.0  # of connections
_POLL_S = 0.05


class Node(Protocol):
    """Where a worker runs."""

    name: str

    def turn_soon(self) -> None: ...

    def say(self, text: str) -> None: ...


class SimGroup:
    """The workers of one round, once they have come."""

    def __init__(self, number: int, size: int) -> None:
        self.round, self.size = number, size
        self.members: dict[int, SimWorker] = {}
        self.is_formed = self.is_over = False
        self.stalled_since: float | None = None


class SimTraining:
    """All groups of a job."""

    def __init__(
        self,
        loop: SimLoop,
        random: Random,
        tell: Callable[[str], None],
        reaches: Callable[[str, str], bool],
        steps: int,
    ) -> None:
        self.loop, self.random, self.tell, self.reaches, self.steps = (
            loop,
            random,
            tell,
            reaches,
            steps,
        )
        self.workers: list[SimWorker] = []  # that live
        self.newest = 0
        self.began = 0  # how often a state began from nothing
        self.pids = 1000
        self._digests: dict[int, int] = {}
        self._groups: dict[tuple[str, str, int], SimGroup] = {}
        self._formed: SimGroup | None = None

    @property
    def size(self) -> int:
        """Of the group that was formed last, if it trains."""
        group = self._formed  # a worker may come to an older one later
        return 0 if group is None or group.is_over else group.size

    def arrive(self, worker: SimWorker) -> None:
        """A worker is where its place says."""
        environ, number = worker.environ, worker.attempt
        key = (environ["MASTER_ADDR"], environ["MASTER_PORT"], number)
        size, rank = int(environ["WORLD_SIZE"]), int(environ["RANK"])
        group = self._groups.setdefault(key, SimGroup(number, size))
        if rank in group.members or group.size != size:
            raise ViolationError(f"rank {rank} of round {number} comes twice")
        group.members[rank], worker.group, worker.rank = worker, group, rank
        if group.is_over:  # somebody has come and gone
            worker.later(self.random.uniform(0.3, 1.5), lambda: worker.lost(group, -1))
            return
        if len(group.members) == size:
            self.loop.after(self.random.uniform(0.002, 0.02), lambda: self._form(group))

    def _form(self, group: SimGroup) -> None:
        members = list(group.members.values())
        if group.is_over or not self._is_together(group):
            if not group.is_over and not any(each.is_dead for each in members):
                self._stall(group, members, self._form)  # as soon as they are
            return
        before, self._formed = self._formed, group
        group.is_formed, group.stalled_since = True, None
        self._check_alone(group)
        having = [each for each in members if each.has_state]
        if having:
            if before is None or not set(having) <= set(before.members.values()):
                raise ViolationError(f"round {group.round}: an old state is among {having}")
            newest = max(having, key=lambda each: each.step)
            step, digest = newest.step, newest.digest
        elif any(each.is_newcomer for each in members):
            self.tell(f"round {group.round}: the state is lost")
            for each in members:
                each.later(0.001, each.fail)
            return
        else:
            left = [
                each
                for each in self.workers
                if each.has_state and each.can_run and not each.is_saving
            ]
            if left:
                raise ViolationError(f"round {group.round} begins anew, and {left} have a state")
            self.began += 1
            step, digest = 0, self.began
            self._digests.clear()
        self.tell(f"round {group.round}: {group.size} ranks go on from step {step}")
        for each in members:
            each.step, each.digest = step, digest
            each.joined()
        self._step_later(group)

    def _check_alone(self, group: SimGroup) -> None:
        """Nodes that have no place in a round run nothing of one before."""
        nodes = {each.node.name for each in group.members.values()}
        others = [each for each in self.workers if each.node.name not in nodes]
        beside = [each for each in others if each.has_state and each.can_run and not each.is_saving]
        if beside:
            raise ViolationError(f"{beside} run beside round {group.round}")

    def _step_later(self, group: SimGroup) -> None:
        self.loop.after(self.random.uniform(0.05, 0.1), lambda: self._step(group))

    def _step(self, group: SimGroup) -> None:
        if group.is_over:
            return
        members = list(group.members.values())
        if not self._is_together(group):
            self._stall(group, members, self._step)
            return
        group.stalled_since = None
        if any(each.has_news for each in members):
            return self._end(group, culprit=-1)
        step = members[0].step + 1
        digest = hash((members[0].digest, step, group.size))
        if self._digests.setdefault(step, digest) != digest:
            raise ViolationError(f"step {step} has two states; one was made in round {group.round}")
        for each in members:
            each.step, each.digest = step, digest
        self.newest = max(self.newest, step)
        if step >= self.steps:
            group.is_over = True
            for each in members:
                each.leave()
        else:
            self._step_later(group)
        return None

    def _is_together(self, group: SimGroup) -> bool:
        members = list(group.members.values())
        names = {each.node.name for each in members}
        return all(each.can_run and not each.is_saving for each in members) and all(
            self.reaches(*pair) for pair in itertools.combinations(names, 2)
        )

    def _stall(
        self, group: SimGroup, members: list[SimWorker], again: Callable[[SimGroup], None]
    ) -> None:
        """A call, or the forming, waits: for a stopped process, or over a cut."""
        now = self.loop.now
        since = group.stalled_since = group.stalled_since or now
        late = [each for each in members if not each.can_run or each.is_saving]
        if late and group.is_formed and now - since > TIMEOUT_S:
            group.is_over = True
            for each in members:
                if each not in late:
                    each.say(CallTimedOut(group.round, late[0].rank))
                each.later(0.0, partial(each.lost, group, late[0].rank))
        elif not late and now - since > SILENCE_S:
            self._end(group, culprit=None)
        else:
            self.loop.after(_POLL_S, lambda: again(group))

    def _end(self, group: SimGroup, *, culprit: int | None) -> None:
        """All leave it; None: each blames one that it does not reach."""
        group.is_over = True
        for each in group.members.values():
            other = culprit
            if other is None:
                cut = [
                    o.rank
                    for o in group.members.values()
                    if not self.reaches(each.node.name, o.node.name)
                ]
                other = cut[0] if cut else -1
            each.later(0.0, partial(each.lost, group, other))

    def died(self, worker: SimWorker) -> None:
        """The others of its group notice."""
        self.workers.remove(worker)
        group = worker.group
        if group is None or (group.is_over and worker.step >= self.steps):
            return
        span = (0.0002, 0.01) if group.is_formed else (0.3, 1.5)
        for each in group.members.values():
            if each is not worker:
                each.later(self.random.uniform(*span), partial(each.lost, group, worker.rank))
        group.is_over = True


class SimWorker:
    """One process.

    Attributes:
        environ: what it knows of its place.
        attempt: the round that it goes to, or trains in.
    """

    def __init__(
        self,
        training: SimTraining,
        node: Node,
        *,
        environ: dict[str, str],
        descriptor: int,
        ended: Callable[[int, int], None],
        stopped: Callable[[bool], None],
    ) -> None:
        self.training, self.node, self.environ = training, node, environ
        training.pids += 1
        self.pid = training.pids
        self.rank = self.attempt = self._kept = self._round = -1
        self.step, self.digest = 0, 0
        self.has_state = self.is_dead = self.is_stopped = self.is_paused = self.is_saving = False
        self.is_newcomer = environ.get(STANDBY) == "1"
        self.group: SimGroup | None = None
        self._is_elastic = self.is_newcomer
        self._stage = Stage.SPARE if self.is_newcomer else Stage.ASSIGNED
        self._newest: Place | None = None
        self._waits_after: int | None = None  # for a place in a round after that one
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._ended, self._stopped = ended, stopped
        self._unheard: deque[Callable[[], None]] = deque()
        training.workers.append(self)
        self.later(training.random.uniform(0.03, 0.3), self._begin)

    def __repr__(self) -> str:
        return f"{self.pid} on {self.node.name} at step {self.step}"

    # Its process.

    @property
    def can_run(self) -> bool:
        """Whether it lives, and is not stopped."""
        return not (self.is_dead or self.is_stopped or self.is_paused)

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        """It does that after the delay, or once it runs again."""
        self.training.loop.after(delay_s, lambda: self._run(what))

    def _run(self, what: Callable[[], None]) -> None:
        if self.is_dead:
            return
        if not self.can_run:
            self._unheard.append(what)
            return
        what()

    def signal(self, number: int) -> None:
        """It receives a signal."""
        if self.is_dead:
            return
        if number == signal.SIGKILL:
            self._exit(_KILLED, number)
        elif number == signal.SIGSTOP and not self.is_paused:
            self.is_stopped = True
            self._stopped(True)
        elif number == signal.SIGCONT and self.is_stopped:
            self.is_stopped = False
            self._stopped(False)
            self._catch_up()
        elif number == signal.SIGTERM and not self.is_saving:
            self.is_saving = True  # a checkpoint, say
            delay_s = self.training.random.choice((0.1, 0.1, 20.0)) * self.training.random.random()
            self.later(delay_s, lambda: self._exit(_KILLED, number))

    def pause(self) -> None:
        """The guardian stops it."""
        self.is_paused = True

    def resume(self) -> None:
        """The guardian lets it run, and others' stops end, too."""
        self.is_paused = False
        if self.is_stopped:
            self.signal(signal.SIGCONT)
        self._catch_up()

    def _catch_up(self) -> None:
        while self._unheard and self.can_run:
            self._unheard.popleft()()

    def die(self) -> None:
        """At once, with the node."""
        if not self.is_dead:
            self.is_dead = True
            self._socket.close()
            self.training.died(self)

    def _exit(self, code: int, status: int) -> None:
        if not self.is_dead:
            self.node.say(f"{self.pid} (rank {self.rank}) ends, {status}")
            self.die()
            self._ended(code, status)

    def kill(self) -> None:
        """With -9."""
        self.signal(signal.SIGKILL)

    def fail(self) -> None:
        """With an exception of the program's."""
        self._raise("ValueError", is_secondary=False)

    def succeed(self) -> None:
        """It ends with code 0, although others train."""
        self._run(lambda: self._exit(_EXITED, 0))

    def _raise(self, error: str, *, is_secondary: bool) -> None:
        now = 1e9 + self.training.loop.now
        self.say(WorkerError(error, "it failed", "", now, is_secondary))
        self.later(self.training.random.uniform(0.002, 0.05), lambda: self._exit(_EXITED, 1))

    # Its agent.

    def fileno(self) -> int:
        """Of its end of the control socket."""
        return self._socket.fileno()

    def say(self, message: Known) -> None:
        """To its agent."""
        if not self.is_dead:
            try:
                self._socket.send(encode(message))
            except OSError:
                return
            self.node.turn_soon()

    def hear_soon(self) -> None:
        """Its agent may have said something."""
        self.later(self.training.random.uniform(0.0001, 0.001), self._hear)

    def _hear(self) -> None:
        while not self.is_dead:
            try:
                packet = self._socket.recv(MAX_MESSAGE_BYTES + 1)
            except OSError:
                return
            if not packet:
                return self._agent_is_gone()
            match decode(packet):
                case Place() as place:
                    self._hear_place(place)
                case Kept(number):
                    self._kept = max(self._kept, number)
                case Released():
                    self._released()
        return None

    def _agent_is_gone(self) -> None:
        self._kept = -1

    def _report(self) -> None:
        self.say(WorkerReport(self._stage, self._round, self._is_elastic))

    def _reach(self, stage: Stage, number: int, *, is_elastic: bool) -> None:
        self._is_elastic = is_elastic
        if number >= self._round:
            self._stage, self._round = move(self._stage, stage), number
        self._report()

    @property
    def has_news(self) -> bool:
        """Whether it knows of a newer round than the one in which it trains."""
        return self._newest is not None and self._newest.round > self.attempt

    def _hear_place(self, place: Place) -> None:
        if self._newest is not None and place.round <= self._newest.round:
            return
        self._newest = place
        if self._stage is Stage.LEFT:
            return
        was_leaving = self._stage is Stage.LEAVING
        self._is_elastic |= was_leaving
        self._stage, self._round = move(self._stage, Stage.ASSIGNED), place.round
        self._report()
        group = self.group
        trains = group is not None and group.is_formed and not group.is_over
        if (place.is_urgent or not trains) and not self.is_saving:
            self._go()

    def _blame_later(self, other: SimWorker, group: SimGroup) -> None:
        other.later(
            self.training.random.uniform(0.0002, 0.005), lambda: other.lost(group, self.rank)
        )

    # Rounds.

    def _begin(self) -> None:
        if self.is_newcomer:
            return self._reach(Stage.READY, -1, is_elastic=True)
        self.attempt = self._round = int(self.environ[ROUND])
        return self.training.arrive(self)

    def _go(self) -> None:
        """To the newest round."""
        place, group = self._newest, self.group
        assert place is not None
        self._waits_after, self.group = None, None
        if group is not None and not group.is_over:
            group.is_over = True  # nobody can complete a call without it, or form that group
            for each in group.members.values():
                if each is not self:
                    self._blame_later(each, group)
        self.attempt = place.round
        self.environ.update(place.environ)

        def arrive() -> None:
            if self.attempt == place.round:
                self.training.arrive(self)

        self.later(self.training.random.uniform(0.001, 0.005), arrive)

    def joined(self) -> None:
        """Its group has formed, and it gets the state."""
        had_state, self.has_state = self.has_state, True
        self._run(
            lambda: self._reach(
                Stage.JOINED, self.attempt, is_elastic=self._is_elastic or had_state
            )
        )
        number = self.attempt

        def synchronized() -> None:
            if self.attempt == number and self._stage is Stage.JOINED:
                self._reach(Stage.SYNCHRONIZED, number, is_elastic=True)

        self.later(self.training.random.uniform(0.001, 0.005), synchronized)

    def lost(self, group: SimGroup, culprit: int) -> None:
        """Its group is over: it waits for a place, if it may."""
        if self.group is not group:
            return
        self.group = None
        if self.has_news:
            return self._go()
        if not self._is_elastic:
            return self._raise("PeerLostError", is_secondary=True)
        self._waits_after = group.round
        return self.later(NEWS_S, lambda: self._complain(group, culprit))

    def _waits_for(self, group: SimGroup) -> bool:
        return self._waits_after == group.round

    def complain_of(self, number: int, culprit: int, *, had_formed: bool) -> None:
        """It does not reach that rank of that round."""
        self.say(LostContact(number, culprit, had_formed))

    def _complain(self, group: SimGroup, culprit: int) -> None:
        if self._waits_for(group) and self._kept < group.round:
            self.complain_of(group.round, culprit, had_formed=group.is_formed)
        self.later(REMEDY_S, lambda: self._give_up(group))

    def _give_up(self, group: SimGroup) -> None:
        if not self._waits_for(group) or self.is_saving:  # it ends anyway
            return
        if self._kept < group.round:
            raise ViolationError(f"{self} gives up, with all that it has")
        self.later(REMEDY_S, lambda: self._give_up(group))

    def leave(self) -> None:
        """All steps are done."""

        def leave() -> None:
            if self._stage is Stage.ASSIGNED:
                return self._go()
            self._reach(Stage.LEAVING, self.attempt, is_elastic=False)
            return self.later(NEWS_S, self._released)

        self._run(leave)

    def _released(self) -> None:
        if self._stage is Stage.LEAVING:
            self._stage = move(self._stage, Stage.LEFT)
            self.later(self.training.random.uniform(0.001, 0.02), lambda: self._exit(_EXITED, 0))
