"""The worker processes of one node: their ranks in the round, and those on standby.

A round usually begins with new processes. Workers that outlive a loss keep their processes and
local ranks, and get new ranks. Workers on standby, which wait in init_process_group, take the
places of the lost ones.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from rallypoint.base.control_message import (
    MAX_MESSAGE_BYTES,
    Kept,
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
from rallypoint.base.ready import earliest
from rallypoint.base.record import Record
from rallypoint.base.worker_hook import LAUNCHERS_STDERR, identity_of
from rallypoint.launch.agent.final_reports import RoundEvidence
from rallypoint.launch.agent.guardian import Guardian, GuardianReport
from rallypoint.launch.agent.node import NodeDecision, NodeState
from rallypoint.launch.job import Job, place_environ, worker_environ
from rallypoint.launch.output.flight_report import FlightRecords
from rallypoint.launch.output.progress import ProgressReporter
from rallypoint.launch.output.streams import Output, Streams
from rallypoint.launch.rounds.source import RoundSource
from rallypoint.launch.worker_group import WorkerExit
from rallypoint.rendezvous.job.round import Placement, Seat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.base.recorded_steps import RecordedSteps

_NUMBERS = (
    1 << 32
) - 1  # the guardian knows each worker by one of so many; template_process.py has one
# A worker that continues confirms its new place at once, unless it is stopped, or one of
# its threads keeps the GIL.
ANSWER_S = 10.0
COME_S = 60.0
_MAX_ERROR_FILE_BYTES = 1 << 20
_MAX_PER_READ = 16  # messages; one worker must not keep the agent from the others


class AgentParts(Record, kw_only=True):
    """What the parts of an agent share.

    Attributes:
        perform: performs the decisions of `state`.
        inspect: records where the workers are, before they are ended.
        read_workers: handles what they have sent so far, whatever the order of events.
    """

    job: Job
    selector: selectors.BaseSelector
    rounds: RoundSource
    state: NodeState
    workers: LocalWorkers
    progress: ProgressReporter
    perform: Callable[[NodeDecision], None]
    inspect: Callable[[], None]
    read_workers: Callable[[], None]


class LocalWorkers:
    """The workers.

    Attributes:
        by_rank: those of the round.
        standbys: those without a rank.
        seat: this node's part in the round; None before the first.
        evidence: what is remembered of the round; None before the first.
    """

    def __init__(
        self, job: Job, selector: selectors.BaseSelector, read: Callable[[Worker], None]
    ) -> None:
        self.by_rank: dict[int, Worker] = {}
        self.standbys: list[Worker] = []
        self.seat: Seat | None = None
        self.evidence: RoundEvidence | None = None
        self._job, self._selector, self._read = job, selector, read
        self._by_number: dict[int, Worker] = {}
        self._next_number = 0

    @property
    def world_size(self) -> int:
        """The number of ranks of the round, on all nodes."""
        return 0 if self.seat is None else self.seat.world_size

    @property
    def wake_at(self) -> float | None:
        """When to look for workers that have not answered; None: no answer is awaited."""
        return earliest(*(worker.answer_by for worker in self.by_rank.values()))

    @property
    def pids(self) -> dict[int, int]:
        """The processes, by rank."""
        return {rank: worker.pid for rank, worker in self.by_rank.items()}

    @property
    def record_slots(self) -> dict[int, int]:
        """Where each rank's flight record is."""
        return {rank: worker.record_slot for rank, worker in self.by_rank.items()}

    @property
    def ready(self) -> list[Worker]:
        """The workers on standby that wait for a place."""
        return [each for each in self.standbys if each.report.stage is Stage.READY]

    @property
    def empty(self) -> int:
        """How many of the node's places are empty in this round."""
        return self._job.local_world_size - len(self.by_rank)

    def steps(self) -> RecordedSteps | None:
        """How far the program is; None if that is not known."""
        if self.evidence is None:
            return None
        ranks = sorted(self.by_rank)
        return self.evidence.records.steps(self.by_rank[rank].record_slot for rank in ranks)

    def of(self, number: int) -> Worker | None:
        """The worker that the guardian knows by that number; None: it is of a round before."""
        return self._by_number.get(number)

    # Rounds.

    def begin(self, guardian: Guardian, output: Output, seat: Seat) -> None:
        """Start new workers for all places."""
        self.seat = seat
        output.start_round(seat.number)
        records = FlightRecords(seat.local_world_size + self._job.spares)
        self.evidence = RoundEvidence(self._job, seat, records)
        for place in seat.placements:
            worker = self._new(place, output)
            self.by_rank[place.rank] = worker
            worker.start(guardian, seat, records.fileno())

    def places_for(self, seat: Seat, kept: Collection[Worker]) -> list[tuple[Placement, Worker]]:
        """Assign the places of a round that other workers of the job outlived the last one for.

        Survivors keep their local ranks, and their order. There may be fewer than the seat needs,
        if more were lost meanwhile.
        """
        by_local_rank = {worker.local_rank: worker for worker in kept}
        free = [each for each in range(self._job.local_world_size) if each not in by_local_rank]
        waiting = self.ready
        for worker in [each for each in waiting if each.local_rank in free]:
            if len(by_local_rank) < seat.local_world_size:
                free.remove(worker.local_rank)
                by_local_rank[worker.local_rank] = worker
                waiting.remove(worker)
        for worker in waiting:
            if free and len(by_local_rank) < seat.local_world_size:
                by_local_rank[free.pop(0)] = worker
        chosen = sorted(by_local_rank)[: seat.local_world_size]
        return [
            (place.__replace__(local_rank=local_rank), by_local_rank[local_rank])
            for place, local_rank in zip(seat.placements, chosen, strict=False)
        ]

    def go_on(
        self, seat: Seat, places: Sequence[tuple[Placement, Worker]], *, is_urgent: bool, now: float
    ) -> None:
        """Tell these workers their places; let go those that have ended."""
        self.seat = seat
        seated = [worker for _, worker in places]
        before = list(self.by_rank.values())
        self.by_rank = {place.rank: worker for place, worker in places}
        self.standbys = [each for each in self.standbys if each not in seated]
        for place, worker in places:
            worker.take(place, seat, is_urgent=is_urgent)
            if is_urgent or worker.is_stopped:
                self._expect(worker, now)
        for worker in before:
            if worker not in seated:
                self._make_room(worker)
        if self.evidence is not None:
            self.evidence = self.evidence.renewed(seat)

    def stand_by(self, guardian: Guardian, output: Output) -> None:
        """Start workers on standby until there is one for each empty place, and the spares."""
        seat, evidence = self.seat, self.evidence
        assert seat is not None
        assert evidence is not None
        size, spares = self._job.local_world_size, self._job.spares
        taken = {worker.local_rank for worker in (*self.by_rank.values(), *self.standbys)}
        wanted = self.empty + spares - len(self.standbys)
        free = [each for each in range(size + spares) if each not in taken][: max(wanted, 0)]
        output.directory.start_round(seat.number)
        for local_rank in free:
            worker = self._new(Placement(rank=-1, local_rank=local_rank, role_rank=-1), output)
            self.standbys.append(worker)
            evidence.records.make_room(worker.record_slot)
            worker.start(guardian, seat, evidence.records.fileno())

    def stopped(self, worker: Worker, round_number: int, now: float) -> None:
        """A signal has stopped it. The others cannot continue without it."""
        worker.is_stopped = True
        is_newcomer = worker.rank < 0 or worker.report.round < 0  # or one of the job's first round
        if not is_newcomer and not _has_answered(worker, round_number):
            self._expect(worker, now)

    def unanswered(self, round_number: int, now: float) -> list[Worker]:
        """Workers that have not answered for too long.

        A newcomer that has its place may take any time to load and build what it needs.
        """
        if self.wake_at is None or now < self.wake_at:
            return []
        late = []
        for each in self.by_rank.values():
            if _has_answered(each, round_number):
                each.answer_by = None
            elif each.answer_by is not None and now >= each.answer_by:
                each.answer_by = None
                late.append(each)
        return late

    def _expect(self, worker: Worker, now: float) -> None:
        """An answer; one that is silent already gets no more time."""
        if worker.answer_by is None:
            worker.answer_by = now + ANSWER_S

    def pause(self) -> None:
        """They are stopped, and cannot answer."""
        for each in self.by_rank.values():
            each.answer_by = None

    def have(self, stage: Stage, round_number: int) -> bool:
        """Whether all workers of this node have come so far in that round."""
        return all(each.report.has(stage, round_number) for each in self.by_rank.values())

    def lost_standby(self, worker: Worker) -> None:
        """A worker on standby has ended."""
        self.standbys.remove(worker)
        self._make_room(worker)

    def let_all_go(self) -> None:
        """Everything has ended: pass on what is left of the output, and forget all."""
        for worker in (*self.by_rank.values(), *self.standbys):
            self._let_go(worker)
        self.by_rank.clear()
        self.standbys.clear()
        self._by_number.clear()
        if self.evidence is not None:
            self.evidence.records.close()

    def keep(self, ranks: Sequence[int], round_number: int) -> None:
        """Tell these ranks that they are to be in the round after that one."""
        for rank in ranks:
            worker = self.by_rank.get(rank)
            if worker is not None:
                worker.control.send(Kept(round_number))

    def signal(self, guardian: Guardian, ranks: Sequence[int], number: int) -> None:
        """Send a signal to these ranks."""
        for rank in ranks:
            worker = self.by_rank.get(rank)
            if worker is not None:
                guardian.signal(worker.number, number)

    # Processes.

    def _new(self, place: Placement, output: Output) -> Worker:
        used = {worker.record_slot for worker in self._by_number.values()}
        slot = next(each for each in range(len(used) + 1) if each not in used)
        worker = Worker(
            self._job, place, output.streams_of(place), number=self._next_number, record_slot=slot
        )
        self._next_number = (self._next_number + 1) % _NUMBERS
        self._by_number[worker.number] = worker
        self._selector.register(worker.control, selectors.EVENT_READ, lambda: self._speaks(worker))
        return worker

    def _speaks(self, worker: Worker) -> None:
        if self._by_number.get(worker.number) is worker:  # it was not let go in this very turn
            self._read(worker)

    def _make_room(self, worker: Worker) -> None:
        """It has ended, and another one may write its record where this one has."""
        self._let_go(worker)
        if self.evidence is not None:
            self.evidence.records.clear(worker.record_slot)

    def _let_go(self, worker: Worker) -> None:
        worker.drain_output()
        if worker.control in self._selector.get_map():
            self._selector.unregister(worker.control)
        worker.control.close()
        self._by_number.pop(worker.number, None)


def _has_answered(worker: Worker, round_number: int) -> bool:
    """That it knows its place in that round; if it is stopped, that it has come there."""
    return worker.report.has(Stage.JOINED if worker.is_stopped else Stage.ASSIGNED, round_number)


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
            have formed the round's group; None: that is not awaited.
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
