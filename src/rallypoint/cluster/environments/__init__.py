"""Recognises from variables where this program was started: a Slurm step, a pod, mpirun, ...

    environment --> recognize ----> Reading: which node this is, of how many, and their endpoint
                    find_process -> LaunchedProcess: its rank, and how all of them connect

Pure: other inputs (this host's name, /etc/hosts) are arguments. Other files read the variables of
each kind of place; this one decides if those of several places are set. cli/surroundings.py
decides what a launch does with a reading, and which flags take precedence. A process that our
launcher did not start gets its rank here; cluster/pmi defines how such processes connect.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.base.worker_env import ENV, is_env_given

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

HERE = ("here", "none")
VARIABLE = "RALLYPOINT_CLUSTER"  # one of KINDS or HERE
# Innermost first: the program that starts processes within an allocation is closer to them than the
# allocation's manager, which is closer than the surrounding pod and cloud. For each kind, the
# variables that must all be set.
_LEVELS: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {
        "open_mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        "mvapich2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        "pals": ("PALS_RANKID", "PMI_SIZE"),
        "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    },
    {"hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")},  # also MVAPICH2's mpiexec
    {"flux": ("FLUX_JOB_ID", "FLUX_TASK_RANK")},  # often started within a Slurm allocation
    {"slurm": ("SLURM_JOB_ID",)},
    {
        "leader_worker_set": ("LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"),
        "volcano": ("VC_TASK_INDEX",),
        "indexed_job": ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
    },
    {
        "aws_batch": ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
        "sagemaker": ("SM_HOSTS", "SM_CURRENT_HOST"),
        "skypilot": ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
        "dstack": ("DSTACK_NODE_RANK", "DSTACK_NODES_IPS"),
    },
)
# The kinds of program that start the processes of a job.
STARTERS = _LEVELS[:4]
# The files that read the kinds of each level.
_READERS = ("mpi", "mpi", "mpi", "slurm", "clouds", "clouds")
KINDS = tuple(kind.replace("_", "-") for level in _LEVELS for kind in level)
# Set in a worker, which inherits its launcher's variables: they do not describe the worker.
_WORKER = "TORCHELASTIC_RUN_ID"
_OFF = f"{VARIABLE}=none"
PORT = 29400  # of the rendezvous, if the place names none
_FIRST_PORT, _PORTS = 20000, 12768  # below the ports that the kernel assigns to connections
_FAR = 1597
MOST_ENDPOINTS = 3  # so that the job can start, and continue, without one of them


class HostFacts(Record):
    """What is known of this machine without variables: its name, and the text of its /etc/hosts."""

    name: str
    table: str = ""


class Reading(Record, kw_only=True):
    """What is known of this node.

    Attributes:
        place: its name, as in "Slurm step 12.0".
        by: the variable by which it was recognised.
        node_rank, nodes: this node's rank, and the number of nodes; None if unknown.
        endpoints: the rendezvous endpoints, as HOST:PORT, in the order to be tried.
        run_id: the job's name there.
        sources: the variables for "node rank", "nodes", "meeting at" and "job's name".
        wrong: why a job of several nodes cannot start, and what to do; empty if it can.
        note: what a user should know when running on this node alone.
    """

    place: str
    by: str
    node_rank: int = 0
    nodes: int | None = 1
    endpoints: tuple[str, ...] = ()
    run_id: str = ""
    sources: Mapping[str, str] = MappingProxyType({})
    wrong: str = ""
    note: str = ""


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


def recognize(environ: Mapping[str, str], host: HostFacts, on: str = "") -> Reading | None:
    """What the variables say; None if they describe no known place.

    Args:
        on: one of `KINDS` to consider only that, or one of `HERE` for none; empty: all are
            considered.
    """
    kind = find_kind(environ, on, _LEVELS)
    if not kind:
        return None
    reading: Reading = reader_of(kind).read(environ, host, kind)
    return reading


def find_kind(
    environ: Mapping[str, str], on: str, levels: Sequence[Mapping[str, tuple[str, ...]]]
) -> str:
    """The innermost kind whose variables are set; empty if there is none. See `recognize`."""
    if on in HERE or (not on and environ.get(_WORKER)):
        return ""
    if on and on not in KINDS:
        raise InvalidArgumentError(
            f"{on!r} is not a known environment; choose one of {', '.join((*HERE, *KINDS))}."
        )
    for level in levels:
        kinds = [
            kind
            for kind, names in level.items()
            if all(environ.get(name) for name in names) and on in ("", kind.replace("_", "-"))
        ]
        if len(kinds) > 1:
            first, second = (f"{kind.replace('_', '-')} ({level[kind][0]})" for kind in kinds[:2])
            raise InvalidArgumentError(
                f"this could be {first} or {second}; choose one with --on, or none with --on here."
            )
        if kinds:
            return kinds[0]
    wished = on.replace("-", "_")
    names = next((level[wished] for level in levels if wished in level), ())
    if names:
        missing = [name for name in names if not environ.get(name)]
        verb = "is" if len(missing) == 1 else "are"
        raise InvalidArgumentError(f"this is not {on}: {' and '.join(missing)} {verb} not set.")
    return ""


def reader_of(kind: str) -> ModuleType:
    """The module that reads a kind."""
    file = next(file for file, level in zip(_READERS, _LEVELS, strict=True) if kind in level)
    return importlib.import_module(f"{__name__}.{file}")


def find_process(
    environ: Mapping[str, str], *, rank: int = -1, world_size: int = -1
) -> LaunchedProcess | None:
    """This process's identity, if the variables of ``env://`` do not give it; None if they do, or
    no known launcher started it.

    Args:
        rank, world_size: the caller's arguments; -1 if not given.
    """
    if is_env_given(environ, rank=rank, world_size=world_size):
        return None
    given = {"RANK": str(rank) if rank >= 0 else environ.get("RANK", "")}
    given["WORLD_SIZE"] = str(world_size) if world_size >= 0 else environ.get("WORLD_SIZE", "")
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


# For the files that read the variables of each kind.


def whole(environ: Mapping[str, str], name: str, *, least: int = 0) -> int:
    """The value of a variable as a whole number."""
    text = environ.get(name, "")
    if not text:
        raise InvalidArgumentError(
            f"{name} is not set, although related variables are; --on here ignores them."
        )
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise InvalidArgumentError(
            f"{name} is {text!r} in the environment; it must be an integer of at least {least}."
            " --on here ignores it."
        )
    return int(text)


def optional(environ: Mapping[str, str], name: str, *, least: int = 0) -> int | None:
    """As `whole`; None if the variable is not set."""
    return whole(environ, name, least=least) if environ.get(name) else None


def numbered(
    place: str,
    environ: Mapping[str, str],
    *,
    rank: str,
    hosts: Sequence[str],
    hosts_by: str,
    run_id: str = "",
    run_id_by: str = "",
    port: int = PORT,
) -> Reading:
    """The node in a list of hosts whose number is in the variable `rank`."""
    node_rank = whole(environ, rank)
    if node_rank >= len(hosts):
        raise InvalidArgumentError(
            f"{rank} is {node_rank}, but {hosts_by} has {len(hosts)} hosts; --on here ignores both."
        )
    sources = {"node rank": rank, "nodes": hosts_by, "meeting at": hosts_by}
    return Reading(
        place=place,
        by=rank,
        node_rank=node_rank,
        nodes=len(hosts),
        endpoints=tuple(f"{_bracketed(host)}:{port}" for host in hosts[:MOST_ENDPOINTS]),
        run_id=run_id,
        sources={**sources, "job's name": run_id_by} if run_id else sources,
    )


def derived_port(job: str, step: int, attempt: int = 0, *, choice: int = 0) -> int:
    """A port for a step of a job, on machines that others use, too.

    The steps of an attempt have different ports, and a restarted job does not connect to what may
    be left of its previous attempt.

    Args:
        choice: selects another port if the first is taken; far from those of the next steps.
    """
    from zlib import crc32

    text = f"{job} {attempt}" if attempt else job
    return _FIRST_PORT + (crc32(text.encode()) + step + choice * _FAR) % _PORTS


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
