"""Decides what to do when a worker ends, fails or is to be stopped: what happened and `now` go in,
actions and their reason come out. No clock, process or descriptor is touched here.

    RUNNING --failure--------------> STOPPING --all ended, or out of time--> ENDING --> DONE
       |  \\--echo--> HOLDING --root-/                                          ^
       \\--all ended------------------------------------------------------------/

STOPPING: workers were asked to end. ENDING: whatever is left, grandchildren included, is killed.
An *echo* is a failure that only reports another rank's death; HOLDING gives that one time to show.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rallypoint.base.control_message import WorkerError

SIGINT, SIGTERM, SIGCONT = 2, 15, 18
ECHO_GRACE_S = 0.3


class State(Enum):
    """Where the job stands."""

    RUNNING = "running"
    HOLDING = "holding"
    STOPPING = "stopping"
    ENDING = "ending"
    DONE = "done"


_MOVES: dict[State, tuple[State, ...]] = {
    State.RUNNING: (State.HOLDING, State.STOPPING, State.ENDING, State.DONE),
    State.HOLDING: (State.STOPPING, State.ENDING, State.DONE),
    State.STOPPING: (State.ENDING, State.DONE),
    State.ENDING: (State.DONE,),
    State.DONE: (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a worker ended: `code`, or `signal`, or the `start_error` that kept it from starting."""

    rank: int
    pid: int
    time_s: float
    code: int | None = None
    signal: int | None = None
    core_dumped: bool = False
    start_error: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with code 0."""
        return self.code == 0


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Send `signal` to the process groups of these ranks."""

    ranks: tuple[int, ...]
    signal: int


@dataclass(frozen=True, slots=True)
class EndEverything:
    """Kill every process below the guardian; answer with `everything_ended`."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Report and leave with this exit status."""

    status: int


Action = SignalWorkers | EndEverything | Finish


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why; without a reason, nothing has changed."""

    actions: tuple[Action, ...] = ()
    reason: str = ""


NOTHING = Decision()


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that failed, as opposed to one that the launcher stopped."""

    exit: Exit
    error: WorkerError | None

    @property
    def is_echo(self) -> bool:
        """Whether it only reports another rank's death."""
        return self.error is not None and self.error.is_echo

    @property
    def time_s(self) -> float:
        """When it showed: an exception shows before its process ends."""
        return min(self.exit.time_s, self.error.time_s) if self.error else self.exit.time_s


class JobState:
    """One job on one machine. Each method takes one event and gives one `Decision`."""

    def __init__(self, world_size: int, *, shutdown_timeout_s: float) -> None:
        self.state = State.RUNNING
        self.world_size = world_size
        self.running: set[int] = set(range(world_size))
        self.exits: dict[int, Exit] = {}
        self.errors: dict[int, WorkerError] = {}
        # Who still ran when the launcher began to stop the job: their ends are its doing.
        self.stopped: set[int] = set()
        self.stop_signal: int | None = None
        self.unkillable: tuple[int, ...] = ()
        self.guardian_was_lost = False
        # When to call `tick` at the latest; None: only events matter.
        self.wake_at: float | None = None
        self._shutdown_timeout_s = shutdown_timeout_s

    # Events.

    def worker_reported(self, rank: int, error: WorkerError, now: float) -> Decision:
        """A worker says which exception is ending it."""
        if rank not in self.running:
            return NOTHING
        self.errors.setdefault(rank, error)
        if self.state is State.HOLDING and not error.is_echo:
            return self._stop(SIGTERM, f"rank {rank} raised {error.type} before its peers", now)
        return NOTHING

    def worker_exited(self, end: Exit, now: float) -> Decision:
        """A worker has ended, or could not be started."""
        if end.rank not in self.running:
            return NOTHING
        self.running.discard(end.rank)
        self.exits[end.rank] = end
        match self.state:
            case State.RUNNING | State.HOLDING if not end.succeeded:
                return self._failed(Failure(end, self.errors.get(end.rank)), now)
            case State.RUNNING | State.HOLDING | State.STOPPING if not self.running:
                return self._end("all workers have ended")
        return NOTHING

    def stop_requested(self, signal: int, now: float) -> Decision:
        """A signal asks the launcher to stop the job."""
        match self.state:
            case State.RUNNING | State.HOLDING:
                if not self.failures():
                    self.stop_signal = signal
                return self._stop(signal, f"signal {signal} asked for it", now)
            case State.STOPPING if signal == SIGINT:
                return self._end("interrupted while the workers were stopping")
        return NOTHING

    def tick(self, now: float) -> Decision:
        """Time has passed."""
        if self.wake_at is None or now < self.wake_at:
            return NOTHING
        self.wake_at = None
        match self.state:
            case State.HOLDING:
                return self._stop(SIGTERM, "no rank failed before the first that lost a peer", now)
            case State.STOPPING:
                return self._end(
                    f"{len(self.running)} workers still ran {self._shutdown_timeout_s:g} s"
                    " after they were asked to end"
                )
        return NOTHING

    def everything_ended(self, unkillable: tuple[int, ...]) -> Decision:
        """The guardian has killed and reaped all there was, but for these process numbers."""
        if self.state is not State.ENDING:
            return NOTHING
        self.unkillable = unkillable
        return self._finish("nothing is left running" if not unkillable else "the rest is stuck")

    def guardian_lost(self) -> Decision:
        """The guardian died, and with it all workers."""
        if self.state is State.DONE:
            return NOTHING
        self.guardian_was_lost = True
        return self._finish("the guardian process died")

    # Verdicts.

    def failures(self) -> list[Failure]:
        """Who failed, the root cause first: the earliest that is not an echo, if there is one."""
        found = [
            Failure(end, self.errors.get(rank))
            for rank, end in self.exits.items()
            if not end.succeeded and rank not in self.stopped
        ]
        return sorted(found, key=lambda failure: (failure.is_echo, failure.time_s))

    @property
    def status(self) -> int:
        """The launcher's exit status: 0 only if every worker succeeded."""
        if self.guardian_was_lost or self.failures():
            return 1
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        succeeded = sum(end.succeeded for end in self.exits.values())
        return 0 if succeeded == self.world_size else 1

    # Moves.

    def _failed(self, failure: Failure, now: float) -> Decision:
        rank = failure.exit.rank
        if not self.running:
            return self._end(f"rank {rank} failed and no other runs")
        if not failure.is_echo:
            return self._stop(SIGTERM, f"rank {rank} failed", now)
        if self.state is State.HOLDING:
            return NOTHING
        self._move(State.HOLDING)
        self.wake_at = now + ECHO_GRACE_S
        return Decision((), f"rank {rank} lost a peer; waiting for the one that failed first")

    def _stop(self, signal: int, reason: str, now: float) -> Decision:
        self._move(State.STOPPING)
        # A rank that has said what is ending it failed by itself, even if our signal is faster.
        self.stopped = {rank for rank in self.running if rank not in self.errors}
        self.wake_at = now + self._shutdown_timeout_s
        ranks = tuple(sorted(self.running))
        # SIGCONT: a worker that is suspended could not act on the first signal.
        return Decision((SignalWorkers(ranks, signal), SignalWorkers(ranks, SIGCONT)), reason)

    def _end(self, reason: str) -> Decision:
        self._move(State.ENDING)
        self.wake_at = None
        return Decision((EndEverything(),), reason)

    def _finish(self, reason: str) -> Decision:
        self._move(State.DONE)
        self.wake_at = None
        return Decision((Finish(self.status),), reason)

    def _move(self, to: State) -> None:
        if to not in _MOVES[self.state]:
            raise RuntimeError(f"a job cannot go from {self.state.value} to {to.value}")
        self.state = to
