"""Recognises from variables where this program was started: a Slurm step, a pod, mpirun, ...

    environment --> recognize --> Reading: which node this is, of how many, and where they meet

Pure: other inputs (this host's name, /etc/hosts) are arguments. Other files read the variables of
each kind of place; this one decides if those of several places are set. cli/surroundings.py
decides what a launch does with a reading, and which flags take precedence. process.py reads the
variables of a process that our launcher did not start.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.places.variables import HostFacts, Reading

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
# The kinds of program that start the processes of a job (process.py).
STARTERS = _LEVELS[:4]
# The files that read the kinds of each level.
_READERS = ("mpi", "mpi", "mpi", "slurm", "clouds", "clouds")
KINDS = tuple(kind.replace("_", "-") for level in _LEVELS for kind in level)
# Set in a worker, which inherits its launcher's variables: they do not describe the worker.
_WORKER = "TORCHELASTIC_RUN_ID"


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
