"""What the agent holds of one worker: its control socket, its output, its error file."""

from __future__ import annotations

import os
from collections.abc import Callable

from rallypoint.base.control_message import WorkerError
from rallypoint.launch.control import ControlChannel
from rallypoint.launch.guardian import Guardian, Report, ReportKind
from rallypoint.launch.job import Job, worker_environ
from rallypoint.launch.output import Streams
from rallypoint.launch.worker_group import Exit
from rallypoint.rendezvous.round import Placement, Seat

_CLD_EXITED, _CLD_DUMPED = 1, 3
_STAGES = {
    1: "make a process",
    2: "enter the working directory",
    3: "run",
    4: "bind it to its CPUs",
}
_MAX_ERROR_FILE_BYTES = 1 << 20


class Worker:
    """One worker of a round, from before its start until after its end."""

    def __init__(self, job: Job, place: Placement, streams: Streams) -> None:
        self.rank, self.local_rank = place.rank, place.local_rank
        self.control = ControlChannel()
        self.pid = 0
        self._job = job
        self._place = place
        self._streams = streams

    def start(self, guardian: Guardian, number: int, seat: Seat, record: int) -> None:
        """Ask the guardian for the process, which it is to know by `number`.

        `record` is a descriptor of the memory for the flight records of this node.
        """
        stdout, stderr = self._streams.descriptors
        error_file = self._streams.error_file
        guardian.spawn(
            number,
            self._job.worker_command(self.local_rank),
            worker_environ(self._job, place=self._place, seat=seat, error_file=error_file),
            descriptors=(0, stdout, stderr, self.control.worker_fileno, record),
            cpus=self._job.cpus[self.local_rank] if self._job.cpus else frozenset(),
        )
        self.control.started()
        self._streams.started()

    def exit(self, report: Report) -> Exit:
        """The guardian's word on this worker's end, as coordinator.py takes it."""
        ended_by_itself = report.code == _CLD_EXITED
        if report.kind is ReportKind.SPAWN_FAILED:
            program = self._job.command[0]
            what = f"{_STAGES.get(report.code, 'run')} {program!r}" if report.code == 3 else None
            reason = os.strerror(report.status)
            return Exit(
                rank=self.rank,
                pid=report.pid,
                time_s=report.time_s,
                start_error=f"cannot {what or _STAGES.get(report.code, 'start')}: {reason}",
            )
        return Exit(
            rank=self.rank,
            pid=report.pid,
            time_s=report.time_s,
            code=report.status if ended_by_itself else None,
            signal=None if ended_by_itself else report.status,
            core_dumped=report.code == _CLD_DUMPED,
        )

    def recorded_error(self, parse: Callable[[str], WorkerError | None]) -> WorkerError | None:
        """What torch's @record left, for workers that do not report over the control socket."""
        path = self._streams.error_file
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                return parse(file.read(_MAX_ERROR_FILE_BYTES).decode(errors="replace"))
        except OSError:
            return None

    def keep_error(self, error: WorkerError) -> None:
        """Leave what the worker reported where torch's @record would have written it."""
        path = self._streams.error_file
        if path is None or os.path.exists(path):
            return
        from rallypoint.base.error_file import write_error

        text = f"{error.type}: {error.message}"
        write_error(path, error=text, traceback=error.traceback, time_s=error.time_s)

    def drain_output(self, patience_s: float | None) -> None:
        """After the end of everything: pass on what is left in the pipes (see Outlet.flush)."""
        self._streams.finish(patience_s)
