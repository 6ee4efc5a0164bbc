"""A Slurm step (srun's), or an allocation outside of its steps.

A batch script, too, has the variables of a task (SLURM_PROCID=0, SLURM_NODEID=0), though only one
node runs it: only a step's own variables show that srun started this program.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.worker_env import ENV
from rallypoint.cluster.environments import (
    HostFacts,
    LaunchedProcess,
    Reading,
    derived_port,
    numbered,
    whole,
)
from rallypoint.cluster.environments.hostlist import MOST_HOSTS, expand

_LIST, _TASKS, _STEP = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID"
_ATTEMPT = "SLURM_RESTART_COUNT"  # not set until the job is requeued
_PORTS = 8  # for a step without our launcher


def read(environ: Mapping[str, str], host: HostFacts, kind: str) -> Reading:
    """See `recognize`."""
    del host, kind
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
            f"srun starts {tasks} tasks on a node ({_TASKS}={environ[_TASKS]}), but `rallypoint "
            "run` starts the workers itself: srun --ntasks-per-node=1 rallypoint run "
            f"--nproc-per-node {tasks} ..., or --on here if each task should be its own job."
        ),
    )


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Parse ``2(x3),1``: by node, 2, 2, 2 and 1."""
    found: list[int] = []
    for item in environ.get(_TASKS, "").split(","):
        count, _, rest = item.partition("(x")
        times = rest.removesuffix(")") if rest else "1"
        if not all(each.isascii() and each.isdigit() for each in (count, times)):
            raise InvalidArgumentError(
                f"{_TASKS} is {environ.get(_TASKS, '')!r}, which is not a list such as 1(x4);"
                " --on here ignores it."
            )
        found += [int(count)] * min(int(times), MOST_HOSTS)
    return found


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


def read_process(environ: Mapping[str, str], kind: str) -> LaunchedProcess:
    """See `recognize_process`.

    PMI is not used, because not every site's srun passes on its tasks' messages. Rank 0 is on the
    step's first node, and the ports where it may listen are derived from the step.
    """
    del kind
    job = environ["SLURM_JOB_ID"]
    if not environ.get(_LIST):
        return LaunchedProcess(
            place=f"Slurm job {job}, outside of its steps",
            by="SLURM_JOB_ID",
            wrong=(
                f"srun has not started this process of Slurm job {job} ({_LIST} is not set), so "
                "it has no rank; start it with srun -n N or `rallypoint run`, or set "
                f"{', '.join(ENV)}."
            ),
        )
    step, node = whole(environ, _STEP), whole(environ, "SLURM_NODEID")
    hosts, tasks = expand(environ[_LIST], _LIST), _tasks_per_node(environ)
    rank, size = whole(environ, "SLURM_PROCID"), whole(environ, "SLURM_STEP_NUM_TASKS", least=1)
    if not node < len(hosts) == len(tasks) or sum(tasks) != size:
        raise InvalidArgumentError(
            f"SLURM_NODEID ({node}), {_LIST} ({len(hosts)} hosts), {_TASKS} ({environ[_TASKS]}) and"
            f" SLURM_STEP_NUM_TASKS ({size}) contradict each other; --on here ignores them."
        )
    first = hosts[0] if len(hosts) > 1 else "127.0.0.1"
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    wrong = ""
    if rank == 0 and node > 0:
        wrong = (
            f"rank 0 of Slurm step {job}.{step} is not on the step's first node (SLURM_NODEID is"
            f" {node}), where the others expect it; set {', '.join(ENV)}, or leave out srun's"
            " --distribution."
        )
    return LaunchedProcess(
        place=f"Slurm step {job}.{step}",
        by=_LIST,
        rank=rank,
        size=size,
        local_rank=whole(environ, "SLURM_LOCALID"),
        local_size=tasks[node],
        endpoints=tuple(
            f"{first}:{derived_port(job, step, choice=choice)}" for choice in range(_PORTS)
        ),
        run_id=f"slurm-{job}.{step}.{restart}",
        sources={
            "rank": "SLURM_PROCID, SLURM_STEP_NUM_TASKS",
            "local rank": f"SLURM_LOCALID, {_TASKS}",
            "meeting": _LIST,
        },
        wrong=wrong,
    )
