"""How a job ended, as one node's agent saw it; returned by `agent.perform`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rallypoint.base.record import Record
from rallypoint.launch.worker_group import Failure


class JobResult(Record, kw_only=True):
    """The end of a job.

    Attributes:
        status: the launcher's exit status.
        ranks: of this node's workers in the last round.
        failures: of those that failed in it, the root cause first.
        error_files: by rank, where the launcher keeps an error file.
        recorded: by rank, what a failed worker itself wrote to its error file.
    """

    status: int
    ranks: range = range(0)
    failures: tuple[Failure, ...] = ()
    error_files: Mapping[int, str] = MappingProxyType({})
    recorded: Mapping[int, str] = MappingProxyType({})
