"""Processes that an MPI launcher started: Open MPI, those with Hydra (MPICH, Intel MPI), MVAPICH2,
Cray's PALS, and jsrun; or Flux. Their variables say which process this is, but not where the others
are; most of them pass on messages between processes.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.record import Record
from rallypoint.cluster.environments import HostFacts, LaunchedProcess, Reading, optional, whole


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
    "flux": _Launcher(
        "Flux", "flux run -N NODES -n NODES", "FLUX_TASK_RANK", "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID", "", "PMI_FD",
    ),
}  # fmt: skip


def read(environ: Mapping[str, str], host: HostFacts, kind: str) -> Reading:
    """See `recognize`."""
    del host
    if kind == "flux":
        return _flux(environ)
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
        wrong = _nowhere(launcher.name, f"{rank} of {size} ({launcher.rank})")
    return Reading(
        place=launcher.name,
        by=launcher.rank,
        node_rank=rank,
        nodes=size,
        sources={"node rank": launcher.rank, "nodes": launcher.size},
        wrong=wrong,
    )


def _flux(environ: Mapping[str, str]) -> Reading:
    job = environ["FLUX_JOB_ID"]
    rank, size = whole(environ, "FLUX_TASK_RANK"), whole(environ, "FLUX_JOB_SIZE", least=1)
    nodes = whole(environ, "FLUX_JOB_NNODES", least=1)
    wrong = ""
    if size > nodes:
        once = _LAUNCHERS["flux"].once_per_node.replace("NODES", str(nodes))
        wrong = (
            f"Flux starts {size} tasks on {nodes} nodes (FLUX_JOB_SIZE, FLUX_JOB_NNODES); start "
            f"`rallypoint run` once on each node, as in {once} rallypoint run ..., or with --on "
            "here if each should be its own job."
        )
    elif nodes > 1:
        wrong = _nowhere("Flux", f"{rank} of {nodes} (FLUX_TASK_RANK)")
    return Reading(
        place=f"Flux job {job}",
        by="FLUX_TASK_RANK",
        node_rank=rank,
        nodes=nodes,
        run_id=f"flux-{job}",
        sources={
            "node rank": "FLUX_TASK_RANK", "nodes": "FLUX_JOB_NNODES", "job's name": "FLUX_JOB_ID",
        },
        wrong=wrong,
    )  # fmt: skip


def _nowhere(launcher: str, number: str) -> str:
    return (
        f"{launcher} started this as {number}, but does not provide the other nodes' addresses;"
        " add --nnodes,"
        " --rdzv-backend c10d and --rdzv-endpoint with a host of the job, or --on here if each"
        " should be its own job."
    )


def read_process(environ: Mapping[str, str], kind: str) -> LaunchedProcess:
    """See `recognize_process`."""
    launcher = _LAUNCHERS[kind]
    passes_on = launcher.passes_on if environ.get(launcher.passes_on) else ""
    sources = {"rank": f"{launcher.rank}, {launcher.size}", "meeting": passes_on}
    local = [name for name in (launcher.local_rank, launcher.local_size) if environ.get(name)]
    found = LaunchedProcess(
        place=launcher.name,
        by=launcher.rank,
        rank=whole(environ, launcher.rank),
        size=whole(environ, launcher.size, least=1),
        local_rank=optional(environ, launcher.local_rank),
        local_size=optional(environ, launcher.local_size, least=1),
        passes_on=passes_on,
        sources={**sources, "local rank": ", ".join(local)},
    )
    if kind != "flux":
        return found
    job, is_one_node = environ["FLUX_JOB_ID"], environ.get("FLUX_JOB_NNODES") == "1"
    return found.__replace__(
        place=f"Flux job {job}",
        local_size=found.size if is_one_node else None,
        run_id=f"flux-{job}",
    )
