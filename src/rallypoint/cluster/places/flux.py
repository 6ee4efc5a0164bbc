"""A task of a Flux job. Flux does not name the other tasks, but passes on one task's message."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.cluster.places.process import LaunchedProcess
from rallypoint.cluster.places.variables import HostFacts, Reading, optional, whole

_LOCAL = "FLUX_TASK_LOCAL_ID"


def read(environ: Mapping[str, str], host: HostFacts) -> Reading:
    """See `recognize`."""
    del host
    job = environ["FLUX_JOB_ID"]
    rank, size = whole(environ, "FLUX_TASK_RANK"), whole(environ, "FLUX_JOB_SIZE", least=1)
    nodes = whole(environ, "FLUX_JOB_NNODES", least=1)
    wrong = ""
    if size > nodes:
        wrong = (
            f"Flux starts {size} tasks on {nodes} nodes (FLUX_JOB_SIZE, FLUX_JOB_NNODES); start "
            f"`rallypoint run` once on each node, as in flux run -N {nodes} -n {nodes} rallypoint "
            "run ..., or with --on here if each should be its own job."
        )
    elif nodes > 1:
        wrong = (
            f"Flux started this as {rank} of {nodes} (FLUX_TASK_RANK), but does not say where the "
            "others are; add --nnodes, --rdzv-backend c10d and --rdzv-endpoint with a host of the "
            "job, or --on here if each should be its own job."
        )
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


def read_process(environ: Mapping[str, str]) -> LaunchedProcess:
    """See `recognize_process`."""
    size = whole(environ, "FLUX_JOB_SIZE", least=1)
    passes_on = "PMI_FD" if environ.get("PMI_FD") else ""
    return LaunchedProcess(
        place=f"Flux job {environ['FLUX_JOB_ID']}",
        by="FLUX_TASK_RANK",
        rank=whole(environ, "FLUX_TASK_RANK"),
        size=size,
        local_rank=optional(environ, _LOCAL),
        local_size=size if environ.get("FLUX_JOB_NNODES") == "1" else None,
        passes_on=passes_on,
        run_id=f"flux-{environ['FLUX_JOB_ID']}",
        sources={
            "rank": "FLUX_TASK_RANK, FLUX_JOB_SIZE",
            "local rank": _LOCAL if environ.get(_LOCAL) else "",
            "meeting": passes_on,
        },
    )
