"""`spawn(fn, args, nprocs)`: torch.multiprocessing.spawn's semantics, with its own guardian.

The children are new interpreters. The first that fails ends the others, and its error is raised
here with its traceback. When this process ends, however it ends, so do all children.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.base.errors import InvalidArgumentError, WorkersFailedError
from rallypoint.base.ready import left_until
from rallypoint.launch.agent.guardian import Guardian, GuardianLostError, GuardianReport, ReportKind
from rallypoint.launch.api.call import read_result, write_call
from rallypoint.launch.worker_group import WorkerExit, signal_name


class SpawnContext:
    """Running children. `join` waits for them; `close` ends them."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], nprocs: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rallypoint_spawn_")
        self._path = f"{self._directory.name}/call"
        write_call(self._path, function, args, with_number=True)
        # The guardian removes the files too, if we cannot any more.
        self._guardian = Guardian(temporary_directory=self._directory.name)
        self._running = set(range(nprocs))
        self._pids = [0] * nprocs
        try:
            for number in range(nprocs):
                self._start(number)
            while not all(self._pids) and self._running:
                self._take(self._guardian.read())
        except BaseException:
            self.close()
            raise

    def pids(self) -> list[int]:
        """The children's process numbers."""
        return list(self._pids)

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds; returns True when all have succeeded."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._running:
            if not select.select([self._guardian], [], [], left_until(deadline))[0]:
                return False
            self._take(self._guardian.read())
        self.close()
        return True

    def close(self) -> None:
        """End the children that are still running."""
        self._running.clear()
        self._guardian.close()
        self._directory.cleanup()

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:  # descriptors for a control socket and a record, which are not read
            self._guardian.spawn(
                number,
                (sys.executable, "-m", "rallypoint.launch.api.call", self._path, str(number)),
                os.environ,
                descriptors=(0, 1, 2, theirs.fileno(), theirs.fileno()),
            )

    def _take(self, reports: Sequence[GuardianReport]) -> None:
        for report in reports:
            if report.kind is ReportKind.STARTED:
                self._pids[report.worker] = report.pid
            elif report.kind in (ReportKind.EXITED, ReportKind.SPAWN_FAILED):
                if report.worker not in self._running:
                    continue
                self._running.discard(report.worker)
                number = report.worker
                end = report.end_of(rank=number, local_rank=number, program=sys.executable)
                if not end.succeeded:
                    self._fail(end)

    def _fail(self, end: WorkerExit) -> None:
        number = end.rank
        result = read_result(self._path, number)
        self.close()
        if result is not None and result[2]:
            lines = result[2].strip().removeprefix("Traceback (most recent call last):\n")
            raise WorkersFailedError(
                f"process {number} raised an exception, and the others were terminated:\n{lines}",
                failures={number: result[2]},
            ) from result[1]
        how = end.what if end.signal is None else f"was killed by {signal_name(end.signal)}"
        raise WorkersFailedError(f"process {number} {how}, and the others were terminated")


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Run ``fn(i, *args)`` in `nprocs` new processes, i from 0.

    Args:
        fn: a function, defined at the top level of a module or script; if cloudpickle is installed,
            any function, also in a notebook.
        join: wait for all; otherwise return a context whose `join` does.
        daemon, start_method: accepted for compatibility with torch and ignored: children never
            outlive this process, and always start as new interpreters.

    Raises:
        InvalidArgumentError: `nprocs` is not positive, or `fn` or `args` cannot be passed on.
        WorkersFailedError: with `join`, one failed; its exception is the cause.
    """
    if nprocs < 1:
        raise InvalidArgumentError(f"nprocs={nprocs}; it must be 1 or more.")
    context = SpawnContext(fn, args, nprocs)
    if not join:
        return context
    try:
        context.join()
    except GuardianLostError as error:
        raise WorkersFailedError(f"the processes were killed: {error}") from None
    except WorkersFailedError as error:
        raise error.with_traceback(None) from error.__cause__
    finally:
        context.close()
    return None
