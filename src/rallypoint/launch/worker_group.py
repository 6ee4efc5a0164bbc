"""The workers of one node in one round: which run, how others ended, and the state of the group.

    INIT --started--> HEALTHY --all succeeded--> SUCCEEDED
      \\                  | \\--one failed--> UNHEALTHY --all ended--> FAILED
       \\-----------------+--the launcher ended them--> STOPPED

Pure facts and conclusions; node.py and the coordinator decide what to do about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from signal import Signals

from rallypoint.base.control_message import WorkerError
from rallypoint.base.record import Record

_MAX_MESSAGE = 200  # characters, in a line about a failure
_MAX_OURS = 1000  # our own sentences, some of which say what several ranks called


class GroupState(Enum):
    """The state of a group; the names are torch's."""

    INIT = "init"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


_MOVES: dict[GroupState, tuple[GroupState, ...]] = {
    GroupState.INIT: (GroupState.HEALTHY, GroupState.STOPPED),
    GroupState.HEALTHY: (GroupState.UNHEALTHY, GroupState.SUCCEEDED, GroupState.STOPPED),
    GroupState.UNHEALTHY: (GroupState.FAILED,),
    GroupState.SUCCEEDED: (),
    GroupState.FAILED: (),
    GroupState.STOPPED: (),
}


class Exit(Record, kw_only=True):
    """How a worker ended: `code`, or `signal`, or the `start_error` that kept it from starting.

    Attributes:
        is_early: it left a training in which the others go on, whatever its code.
    """

    rank: int
    pid: int
    time_s: float
    code: int | None = None
    signal: int | None = None
    core_dumped: bool = False
    start_error: str | None = None
    is_early: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with code 0, and was not missed."""
        return self.code == 0 and not self.is_early


class Failure(Record):
    """A worker that failed, as opposed to one that the launcher stopped.

    Attributes:
        killed_because: why the launcher killed it; empty: it did not.
    """

    exit: Exit
    error: WorkerError | None
    killed_because: str = ""

    @property
    def is_echo(self) -> bool:
        """Whether it only reports another rank's death."""
        return self.error is not None and self.error.is_echo

    @property
    def is_startup(self) -> bool:
        """Whether it came before the program's own code ran, so that a retry would fail too."""
        return self.exit.start_error is not None or (
            self.error is not None and self.error.is_startup
        )

    @property
    def time_s(self) -> float:
        """When it was noticed: an exception is noticed before its process ends."""
        return min(self.exit.time_s, self.error.time_s) if self.error else self.exit.time_s

    @property
    def text(self) -> str:
        """One line: which rank failed, and how."""
        return f"rank {self.exit.rank} {self.what}"

    @property
    def what(self) -> str:
        """How it failed: by its exception, if that is known."""
        if self.exit.start_error is not None:
            return f"could not be started: {self.exit.start_error}"
        if self.error is not None:
            message = self.error.message.strip().partition("\n")[0]
            is_ours = self.error.type.startswith("rallypoint.")  # the end says what to do
            limit = _MAX_OURS if is_ours else _MAX_MESSAGE
            if len(message) > limit:
                words, _, rest = message[:limit].rpartition(" ")
                message = f"{words or rest} ..."
            if self.error.type == "SystemExit":
                return f"{self.ending}: {message}"
            return f"raised {self.error.type}{': ' if message else ''}{message}"
        return self.ending

    @property
    def ending(self) -> str:
        """How its process ended."""
        if self.exit.signal is None:
            early = " before the training was over" if self.exit.is_early else ""
            return f"exited with code {self.exit.code}{early}"
        if self.killed_because and self.exit.signal == Signals.SIGKILL:
            return f"was killed by the launcher, as {self.killed_because}"
        dumped = " (core dumped)" if self.exit.core_dumped else ""
        return f"was killed by {signal_name(self.exit.signal)}{dumped}"


def signal_name(number: int) -> str:
    """``"SIGKILL"`` for 9; numbers without a name of their own as ``"signal 35"``."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


class WorkerGroup:
    """The group. Events come in as method calls; ranks are the job's, not the node's."""

    def __init__(self, ranks: Iterable[int], local_ranks: Mapping[int, int] | None = None) -> None:
        """Begin; `local_ranks` is by rank, if they are not 0, 1, ..."""
        self.state = GroupState.INIT
        self.running: set[int] = set(ranks)
        self.local_ranks = local_ranks or {rank: i for i, rank in enumerate(sorted(self.running))}
        self.exits: dict[int, Exit] = {}
        self.errors: dict[int, WorkerError] = {}
        # The ranks that still ran when the launcher began to stop the group: it caused their ends.
        self.stopped: set[int] = set()
        self._killed: dict[int, str] = {}  # as others could go on without them: why, by rank

    def started(self) -> None:
        """The workers are being started."""
        self._move(GroupState.HEALTHY)

    def reported(self, rank: int, error: WorkerError) -> None:
        """A worker reports the exception that is ending it; only the first one counts."""
        self.errors.setdefault(rank, error)

    def exited(self, end: Exit) -> None:
        """A worker has ended."""
        self.running.discard(end.rank)
        self.exits[end.rank] = end
        failed = not end.succeeded and end.rank not in self.stopped
        if failed and self.state is GroupState.HEALTHY:
            self._move(GroupState.UNHEALTHY)

    def killing(self, rank: int, because: str) -> None:
        """The launcher kills a worker which is at fault, so that others can go on."""
        self._killed.setdefault(rank, because)

    def stopping(self) -> None:
        """From now on, ends are caused by the launcher."""
        # A rank that has reported what is ending it failed by itself, even if our signal is faster.
        self.stopped |= {rank for rank in self.running if rank not in self.errors}

    def ended(self) -> None:
        """No process of the group is running."""
        if self.state is GroupState.UNHEALTHY:
            self._move(GroupState.FAILED)
        elif self.state is GroupState.HEALTHY and not self.stopped and not self.running:
            self._move(GroupState.SUCCEEDED)  # with a single failure it would not be healthy
        elif self.state in (GroupState.INIT, GroupState.HEALTHY):
            self._move(GroupState.STOPPED)

    def failure_text(self, end: Exit) -> str:
        """One line on a worker that has just ended, if it failed; empty if it did not."""
        failed = not end.succeeded and end.rank not in self.stopped
        return self.failure_of(end).text if failed else ""

    def failure_of(self, end: Exit) -> Failure:
        """All that is known of a worker that has failed."""
        return Failure(end, self.errors.get(end.rank), self._killed.get(end.rank, ""))

    def failures(self) -> list[Failure]:
        """The failures, root cause first: the earliest that is not an echo, if there is one."""
        found = [
            self.failure_of(end)
            for rank, end in self.exits.items()
            if not end.succeeded and rank not in self.stopped
        ]
        return sorted(found, key=lambda failure: (failure.is_echo, failure.time_s))

    def _move(self, to: GroupState) -> None:
        if to not in _MOVES[self.state]:
            raise RuntimeError(f"a worker group cannot go from {self.state.value} to {to.value}")
        self.state = to
