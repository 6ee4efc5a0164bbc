"""A Slurm step (srun's), or an allocation outside of its steps.

A batch script has variables of a task, too (SLURM_PROCID=0, SLURM_NODEID=0), though only one node
runs it: only a step's own variables tell that srun has started this.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cluster.places.hostlist import expand
from rallypoint.cluster.places.reading import Host, Reading, derived_port, numbered, whole

_LIST, _TASKS, _STEP = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID"
_ATTEMPT = "SLURM_RESTART_COUNT"  # not set before the job is requeued


def read(environ: Mapping[str, str], host: Host) -> Reading:
    """See `recognize`."""
    del host
    job = environ["SLURM_JOB_ID"]
    if not environ.get(_LIST):
        return _allocation(job, environ)
    step = whole(environ, _STEP)
    attempt = whole(environ, _ATTEMPT) if environ.get(_ATTEMPT) else 0
    hosts = expand(environ[_LIST], _LIST)
    nodes = whole(environ, "SLURM_STEP_NUM_NODES", least=1)
    if nodes != len(hosts):
        raise InvalidArgumentError(
            f"SLURM_STEP_NUM_NODES is {nodes}, but {_LIST} has {len(hosts)} hosts; --on here"
            " ignores both."
        )
    found = numbered(
        f"Slurm step {job}.{step}",
        environ,
        rank="SLURM_NODEID",
        hosts=hosts,
        hosts_by=_LIST,
        run_id=f"slurm-{job}.{step}",
        run_id_by=f"SLURM_JOB_ID, {_STEP}",
        port=derived_port(job, step, attempt),
    )
    tasks = max(_tasks_per_node(environ))
    if tasks == 1:
        return found.__replace__(by=_LIST)
    return found.__replace__(
        by=_LIST,
        wrong=(
            f"srun starts {tasks} tasks on a node ({_TASKS}={environ[_TASKS]}), and `rallypoint"
            " run` starts the workers itself: srun --ntasks-per-node=1 rallypoint run"
            f" --nproc-per-node {tasks} ..., or --on here if each task is to be a job of its own."
        ),
    )


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Of ``2(x3),1``: 2 and 1."""
    counts = [item.partition("(x")[0] for item in environ.get(_TASKS, "").split(",")]
    if not all(count.isascii() and count.isdigit() for count in counts):
        raise InvalidArgumentError(
            f"{_TASKS} is {environ.get(_TASKS, '')!r}, which is not a list such as 1(x4);"
            " --on here ignores it."
        )
    return [int(count) for count in counts]


def _allocation(job: str, environ: Mapping[str, str]) -> Reading:
    name = "SLURM_JOB_NUM_NODES"
    nodes = whole(environ, name, least=1) if environ.get(name) else 1
    note = ""
    if nodes > 1:
        note = (
            f"this uses one of the {nodes} nodes of Slurm job {job} ({name}); to use all of them:"
            " srun --ntasks-per-node=1 rallypoint run ..."
        )
    return Reading(place=f"Slurm job {job}, outside of its steps", by="SLURM_JOB_ID", note=note)
