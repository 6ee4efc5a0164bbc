"""How a worker ended, and in which words; the workers of one node in one round.

Pure facts and conclusions; node.py and the coordinator decide what to do about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from signal import Signals

from rallypoint.base.control_message import WorkerError
from rallypoint.base.record import Record

_MAX_MESSAGE = 200  # characters, in a line about a failure
_MAX_OURS = 1000  # our own sentences, some of which say what several ranks called


class WorkerExit(Record, kw_only=True):
    """How a worker ended: `code`, or `signal`, or the `start_error` that kept it from starting.

    Attributes:
        rank: in its round; -1: it had none, as it was on standby.
        error: the exception that ended it, if it reported one.
        is_early: it left a training in which the others continue, whatever its code.
        by_launcher: it still ran, and had not failed, when the launcher began to stop its group.
        was_ended: it still ran then, and had failed.
        killed_because: why the launcher killed it, so that others can continue; empty: it did not.
        recorded: what it wrote to its error file, if it failed.
        error_file: where that file stays; empty: nowhere.
    """

    rank: int
    local_rank: int
    pid: int
    time_s: float
    code: int | None = None
    signal: int | None = None
    core_dumped: bool = False
    start_error: str | None = None
    error: WorkerError | None = None
    is_early: bool = False
    by_launcher: bool = False
    was_ended: bool = False
    killed_because: str = ""
    recorded: str | None = None
    error_file: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with code 0, and was not missed."""
        return self.code == 0 and not self.is_early

    @property
    def failed(self) -> bool:
        """Whether it did not succeed, and the launcher did not stop it."""
        return not self.succeeded and not self.by_launcher

    @property
    def is_secondary(self) -> bool:
        """Whether it only reports another rank's death."""
        return self.error is not None and self.error.is_secondary

    @property
    def is_startup(self) -> bool:
        """Whether it came before the program's own code ran, so that a retry would fail too."""
        return self.start_error is not None or (self.error is not None and self.error.is_startup)

    @property
    def noticed_s(self) -> float:
        """When it was noticed: an exception is noticed before its process ends."""
        return min(self.time_s, self.error.time_s) if self.error else self.time_s

    @property
    def cause(self) -> str:
        """Why it failed, in a word, as in docs/events.md."""
        if self.killed_because:
            return "hang"
        if self.error is not None:
            return "raised"
        return "killed" if self.signal is not None else "ended"

    @property
    def text(self) -> str:
        """One line: which rank failed, and how."""
        return f"rank {self.rank} {self.what}"

    @property
    def what(self) -> str:
        """How it failed: by its exception, if that is known."""
        if self.start_error is not None:
            return f"could not be started: {self.start_error}"
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
        if self.signal is None:
            early = " before the training was over" if self.is_early else ""
            return f"exited with code {self.code}{early}"
        if self.killed_because and self.signal == Signals.SIGKILL:
            return f"was killed by the launcher, as {self.killed_because}"
        dumped = " (core dumped)" if self.core_dumped else ""
        return f"was killed by {signal_name(self.signal)}{dumped}"


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
        self.running: set[int] = set(ranks)
        self.local_ranks = local_ranks or {rank: i for i, rank in enumerate(sorted(self.running))}
        self.exits: dict[int, WorkerExit] = {}
        self.errors: dict[int, WorkerError] = {}
        # The ranks that still ran when the launcher began to stop the group: it caused their ends.
        self.stopped: set[int] = set()
        self._ended_late: set[int] = set()  # those that still ran then, and had failed
        self._killed: dict[int, str] = {}  # as others could continue without them: why, by rank
        self._has_started = self._is_over = False

    def started(self) -> None:
        """The workers are being started."""
        self._has_started = True

    def reported(self, rank: int, error: WorkerError) -> None:
        """A worker reports the exception that is ending it; only the first one counts."""
        self.errors.setdefault(rank, error)

    def exited(self, end: WorkerExit) -> WorkerExit:
        """A worker has ended; returns its end as `completed`."""
        self.running.discard(end.rank)
        end = self.exits[end.rank] = self.completed(end)
        return end

    def killing(self, rank: int, because: str) -> None:
        """The launcher kills a worker which is at fault, so that others can continue."""
        self._killed.setdefault(rank, because)

    def stopping(self) -> None:
        """From now on, ends are caused by the launcher."""
        # A rank that has reported what is ending it failed by itself, even if our signal is faster.
        self.stopped |= {rank for rank in self.running if rank not in self.errors}
        self._ended_late |= self.running - self.stopped

    def ended(self) -> None:
        """No process of the group is running."""
        self._is_over = True

    @property
    def has_failed(self) -> bool:
        """Whether a worker has failed."""
        return any(end.failed for end in self.exits.values())

    @property
    def succeeded(self) -> bool:
        """Whether all workers have ended by themselves, each with success, and nothing is left."""
        is_over = self._has_started and self._is_over
        return is_over and not (self.running or self.stopped or self.has_failed)

    def completed(self, end: WorkerExit) -> WorkerExit:
        """The end of one of its workers, with all that the group knows of it."""
        return end.__replace__(
            error=self.errors.get(end.rank, end.error),
            by_launcher=end.rank in self.stopped,
            was_ended=end.rank in self._ended_late,
            killed_because=self._killed.get(end.rank, end.killed_because),
        )

    def failures(self) -> list[WorkerExit]:
        """The failures, root cause first: the earliest that is not an echo, if there is one."""
        found = [end for end in self.exits.values() if end.failed]
        return sorted(found, key=lambda end: (end.is_secondary, end.noticed_s))
