"""The trace of a job: data only. Times are of the monotonic clock of the worker's machine."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.base.recorded_call import RecordedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    """The calls of one worker.

    Attributes:
        pid: of its process; 0: not known.
        groups: with all calls that were seen, including completed sends and receives.
        exact_ns: since when the times of our calls are exact, before that within some milliseconds.
        missed: calls that were overwritten before they could be read.
        missed_of_others: the same of other backends.
        left_out: calls at the end for which there was no room.
        because: why it could not be traced; then only its last calls are known.
    """

    rank: int
    pid: int
    groups: tuple[RecordedGroup, ...]
    exact_ns: int = 0
    missed: int = 0
    missed_of_others: int = 0
    left_out: int = 0
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTrace:
    """The calls of a node's workers.

    Attributes:
        clock: names its monotonic clock; empty: not known. Nodes with the same name share it.
        began_ns, ended_ns: of the time that was traced.
        wall_ns: the machine's time of day minus that clock; None: not known.
        notes: what could not be seen, as sentences.
    """

    node_rank: int
    host: str
    clock: str
    began_ns: int
    ended_ns: int
    wall_ns: int | None
    workers: tuple[WorkerTrace, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """The calls of a job's workers.

    Attributes:
        notes: what could not be seen, as sentences.
    """

    run_id: str
    round: int
    nodes: tuple[NodeTrace, ...]
    notes: tuple[str, ...] = ()
