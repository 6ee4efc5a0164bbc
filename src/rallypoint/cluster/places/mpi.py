"""Processes that an MPI launcher started: Open MPI, those with Hydra (MPICH, Intel MPI), MVAPICH2,
Cray's PALS, and jsrun. Their variables say which process this is, but not where the others are;
most launchers pass on messages between processes.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.record import Record
from rallypoint.cluster.places.process import LaunchedProcess
from rallypoint.cluster.places.variables import HostFacts, Reading, optional, whole


class _Launcher(Record):
    """A launcher's name, how it starts one process on each node, and its variables."""

    name: str
    once_per_node: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    passes_on: str


_LAUNCHERS = {
    "open_mpi": _Launcher(
        "Open MPI", "mpirun --map-by ppr:1:node", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE",
    ),
    "mvapich2": _Launcher(
        "MVAPICH2", "mpirun -ppn 1", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "PMI_FD",
    ),
    "pals": _Launcher(
        "PALS", "mpiexec --ppn 1", "PALS_RANKID", "PMI_SIZE",
        "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PMI_FD",
    ),
    "jsrun": _Launcher(
        "jsrun", "jsrun -r 1", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK", "", "PMIX_NAMESPACE",
    ),
    "hydra": _Launcher(
        "Hydra's mpiexec", "mpiexec -ppn 1", "PMI_RANK", "PMI_SIZE",
        "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_FD",
    ),
}  # fmt: skip


def read(environ: Mapping[str, str], host: HostFacts, kind: str) -> Reading:
    """See `recognize`."""
    del host
    launcher = _LAUNCHERS[kind]
    rank = whole(environ, launcher.rank)
    size = whole(environ, launcher.size, least=1)
    local_size = optional(environ, launcher.local_size, least=1) or 1
    wrong = ""
    if local_size > 1:
        wrong = (
            f"{launcher.name} started {local_size} of this on one machine "
            f"({launcher.local_size}); start `rallypoint run` once on each machine, as in "
            f"{launcher.once_per_node} rallypoint run --nproc-per-node {local_size} ..., or with "
            "--on here if each should be its own job; or leave out `rallypoint run`, and these "
            "processes are the job's ranks."
        )
    elif size > 1:
        wrong = (
            f"{launcher.name} started this as {rank} of {size} ({launcher.rank}), but does not "
            "say where the others are; add --nnodes, --rdzv-backend c10d and --rdzv-endpoint with "
            "a host of the job, or --on here if each should be its own job."
        )
    return Reading(
        place=launcher.name,
        by=launcher.rank,
        node_rank=rank,
        nodes=size,
        sources={"node rank": launcher.rank, "nodes": launcher.size},
        wrong=wrong,
    )


def read_process(environ: Mapping[str, str], kind: str) -> LaunchedProcess:
    """See `recognize_process`."""
    launcher = _LAUNCHERS[kind]
    passes_on = launcher.passes_on if environ.get(launcher.passes_on) else ""
    sources = {"rank": f"{launcher.rank}, {launcher.size}", "meeting": passes_on}
    local = [name for name in (launcher.local_rank, launcher.local_size) if environ.get(name)]
    return LaunchedProcess(
        place=launcher.name,
        by=launcher.rank,
        rank=whole(environ, launcher.rank),
        size=whole(environ, launcher.size, least=1),
        local_rank=optional(environ, launcher.local_rank),
        local_size=optional(environ, launcher.local_size, least=1),
        passes_on=passes_on,
        sources={**sources, "local rank": ", ".join(local)},
    )
