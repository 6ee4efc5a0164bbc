"""The rank of this process in its job, if mpirun, srun or similar started it.

    environment --> find_process --> Process: its rank, and by what all of them can meet

Pure. Files that read a place for a launch (mpi.py, slurm.py) also read it for a process.
cluster/pmi defines how processes meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.cluster.places import STARTERS, VARIABLE, find_kind, reader_of

_OFF = f"{VARIABLE}=none"
# If all of them are set, they are followed.
ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LaunchedProcess(Record, kw_only=True):
    """One of the processes that a launcher started.

    Attributes:
        place: the launcher's name, as in "Slurm step 12.0".
        by: the variable by which it was recognised.
        rank, size: this process's rank, and the number of processes.
        local_rank, local_size: the same on its machine; None if unknown.
        passes_on: the variable that shows how the launcher passes on messages of its processes
            (PMI_FD or PMIX_NAMESPACE); empty if it does not.
        endpoints: where rank 0 may listen, as HOST:PORT, if the launcher passes on no messages.
        run_id: the job's name there.
        sources: the variables for "rank", "local rank" and "meeting".
        wrong: why this is not a process of a job, and what to do; empty if it is one.
    """

    place: str
    by: str
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    passes_on: str = ""
    endpoints: tuple[str, ...] = ()
    run_id: str = ""
    sources: Mapping[str, str] = MappingProxyType({})
    wrong: str = ""

    @property
    def is_local(self) -> bool:
        """Whether all processes are known to be on this machine."""
        return self.size in (1, self.local_size)

    def to_environ(self) -> dict[str, str]:
        """The variables that torchrun would have set, except for unknown ones."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def find_process(
    environ: Mapping[str, str], *, rank: int = -1, world_size: int = -1
) -> LaunchedProcess | None:
    """This process's identity, if the variables of ``env://`` do not give it; None if they do, or
    no known launcher started it.

    Args:
        rank, world_size: the caller's arguments; -1 if not given.
    """
    given = {"RANK": str(rank) if rank >= 0 else environ.get("RANK", "")}
    given["WORLD_SIZE"] = str(world_size) if world_size >= 0 else environ.get("WORLD_SIZE", "")
    if all({**environ, **given}.get(name) for name in ENV):
        return None
    found = recognize_process(environ)
    if found is None or found.wrong:
        return found
    for name, value in found.to_environ().items():
        if given.get(name) and given[name] != value:
            raise InvalidArgumentError(
                f"{name} is {given[name]}, but {found.place} says {value}"
                f" ({found.sources['rank']}); leave it out, or set all of {', '.join(ENV)}."
            )
    return found


def recognize_process(environ: Mapping[str, str], on: str = "") -> LaunchedProcess | None:
    """What the variables of this process's launcher say; None if no known one started it.

    Args:
        on: as for `recognize`; if empty, the value of RALLYPOINT_CLUSTER.
    """
    wished = on or environ.get(VARIABLE, "")
    try:
        kind = find_kind(environ, "" if wished == "auto" else wished, STARTERS)
        if not kind:
            return None
        found: LaunchedProcess = reader_of(kind).read_process(environ, kind)
    except InvalidArgumentError as error:
        source = f"{'--on' if on else VARIABLE} {wished}: " if wished else ""
        # A process has no flags, so the message must not name one.
        raise InvalidArgumentError(f"{source}{error}".replace("--on here", _OFF)) from None
    return found
