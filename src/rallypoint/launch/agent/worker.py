"""The agent's state for one worker: its control socket, its output, its error file."""

from __future__ import annotations

import os
import socket
import time
from functools import partial

from rallypoint.base.control_message import (
    MAX_MESSAGE_BYTES,
    Known,
    Message,
    Place,
    Stage,
    UnknownMessage,
    WorkerError,
    WorkerReport,
    decode,
    encode,
)
from rallypoint.base.errors import ControlMessageError
from rallypoint.base.worker_hook import LAUNCHERS_STDERR, identity_of
from rallypoint.launch.agent.guardian import Guardian, GuardianReport
from rallypoint.launch.job import Job, place_environ, worker_environ
from rallypoint.launch.output.streams import Streams
from rallypoint.launch.worker_group import WorkerExit
from rallypoint.rendezvous.job.round import Placement, Seat

_MAX_ERROR_FILE_BYTES = 1 << 20
COME_S = 60.0


class Worker:
    """One worker, from before its start until after its end.

    Attributes:
        rank: in the round; -1 on standby.
        number: by which the guardian knows it.
        record_slot: where its flight record is.
        report: how far it is.
        error: what it reports that is ending it.
        is_stopped: a signal has stopped it, which was not the guardian's.
        answer_by: when it is to have answered that it knows its place, or, if it is stopped, to
            have formed the round's group; None: nobody waits for that.
        come_by: when it is to have come from its start on standby to init_process_group; None: it
            has, or the user knows that it has not.
    """

    def __init__(
        self, job: Job, place: Placement, streams: Streams, *, number: int, record_slot: int
    ) -> None:
        self.rank, self.local_rank = place.rank, place.local_rank
        self.number, self.record_slot = number, record_slot
        self.control = ControlChannel()
        self.pid = 0
        self.report = WorkerReport(Stage.SPARE if place.rank < 0 else Stage.ASSIGNED)
        self.is_stopped = False
        self.answer_by: float | None = None
        self.come_by: float | None = None
        self.error: WorkerError | None = None
        self._job = job
        self._place = place
        self._streams = streams

    def start(self, guardian: Guardian, seat: Seat, record: int) -> None:
        """Ask the guardian for the process.

        `record` is a descriptor of the memory for the flight records of this node.
        """
        stdout, stderr = self._streams.descriptors
        environ = worker_environ(
            self._job,
            place=self._place,
            seat=seat,
            error_file=self._streams.error_file,
            record_slot=self.record_slot,
        )
        guardian.spawn(
            self.number,
            self._job.worker_command(self.local_rank),
            {**environ, LAUNCHERS_STDERR: f"{identity_of(2)}"},
            descriptors=(0, stdout, stderr, self.control.worker_fileno, record),
            record_slot=self.record_slot,
            cpus=self._cpus,
        )
        self.control.started()
        self._streams.started()
        if self.rank < 0:
            self.come_by = time.monotonic() + COME_S

    @property
    def _cpus(self) -> frozenset[int]:
        cpus, local_rank = self._job.cpus, self.local_rank
        return cpus[local_rank] if local_rank < len(cpus) else frozenset()

    def take(self, place: Placement, seat: Seat, *, is_urgent: bool) -> None:
        """Tell the running process its place in a round."""
        self._place, self.rank, self.local_rank = place, place.rank, place.local_rank
        self._streams.rename(place)
        environ = place_environ(self._job, place=place, seat=seat)
        self.control.send(Place(seat.number, environ, is_urgent))

    def exit(self, report: GuardianReport) -> WorkerExit:
        """The end of this worker, which the guardian reports."""
        end = report.end_of(
            rank=self.rank, local_rank=self.local_rank, program=self._job.command[0]
        )
        return end.__replace__(error=self.error)

    @property
    def error_file(self) -> str:
        """Where it can record its error; empty if that is not possible."""
        return self._streams.error_file or ""

    def recorded(self) -> str | None:
        """The error that it recorded, as torch's @record does; None if there is none."""
        try:
            return self._streams.files.call(partial(_read, self.error_file))
        except OSError:
            return None

    def keep_error(self, error: WorkerError) -> None:
        """Write the worker's reported error to the file that torch's @record would have used."""
        path = self._streams.error_file
        if path is not None:
            try:
                self._streams.files.call(partial(_keep, path, error))
            except OSError:
                return

    def drain_output(self) -> None:
        """After the end of everything: forward what is left in the pipes."""
        self._streams.finish()


def _read(path: str) -> str:
    # What a worker left may be a pipe; that is not waited for.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return (file.read(_MAX_ERROR_FILE_BYTES) or b"").decode(errors="replace")


def _keep(path: str, error: WorkerError) -> None:
    if os.path.exists(path):
        return
    from rallypoint.base.fatal_error import write_report

    write_report(path, error)


_MAX_PER_READ = 16  # one worker must not keep the agent from the others


class ControlChannel:
    """A socket whose other end a worker inherits.

    It never blocks and never raises for what a worker sends: unreadable messages are dropped,
    because a broken worker must not break the agent.
    """

    def __init__(self) -> None:
        self._socket, self._worker_end = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        )
        self._worker_end.setblocking(True)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    @property
    def worker_fileno(self) -> int:
        """The descriptor for the worker, until `started`."""
        return self._worker_end.fileno()

    def started(self) -> None:
        """The worker has its end; close ours of it, so that its death shows as an end of file."""
        self._worker_end.close()

    def receive(self) -> tuple[list[Message], bool]:
        """The messages received, and whether more may come."""
        messages: list[Message] = []
        for _ in range(_MAX_PER_READ):
            try:
                packet = self._socket.recv(MAX_MESSAGE_BYTES + 1)
            except BlockingIOError:
                return messages, True
            except OSError:
                return messages, False
            if not packet:
                return messages, False
            try:
                message = decode(packet)
            except ControlMessageError:
                continue
            if not isinstance(message, UnknownMessage):
                messages.append(message)
        return messages, True

    def send(self, message: Known) -> None:
        """Send one message; a worker that has ended, or takes none, shows it in other ways."""
        try:
            self._socket.send(encode(message))
        except OSError:
            return

    def close(self) -> None:
        """Close the agent's end."""
        self._socket.close()
        self._worker_end.close()
