"""`rallypoint run --dry-run`: prints what would be started, on which nodes and with which
variables.

Nothing is started, no port is opened and no other machine is asked. What is known only at the
start, such as a free port, is printed as `?`.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.wording import printable
from rallypoint.base.worker_env import MOST_SILENCE_S
from rallypoint.base.worker_hook import CONTROL_FD, FLIGHT_RECORD
from rallypoint.cli.flags import RunOptions
from rallypoint.cli.remote.plan import Plan, read_plan
from rallypoint.cli.remote.starter import NODE
from rallypoint.cluster.remote_shell import command_on
from rallypoint.launch.inspection.entries import shown_name
from rallypoint.launch.job import ELASTIC_BACKENDS, TOKEN, Job, with_silence, worker_environ
from rallypoint.rendezvous.job.round import Endpoint, Seat, seats_of
from rallypoint.rendezvous.timeouts import read_timeouts

_UNKNOWN = "?"
_SECRET = "(a secret)"
_BEGINNING = f"A dry run ({_UNKNOWN}: known only at the start). Nothing is started"
# What an agent learns when nodes have connected; the sizes, too, if their number may vary.
_MET = ("MASTER_ADDR", "MASTER_PORT")
_RANKS = ("GROUP_RANK", "RANK", "ROLE_RANK")
_OWN = (CONTROL_FD, FLIGHT_RECORD)  # descriptors, which the worker does not see
_SIZES = ("GROUP_WORLD_SIZE", "WORLD_SIZE", "ROLE_WORLD_SIZE")


def dry_run(
    options: RunOptions, command: Sequence[str], read: Callable[[RunOptions, Sequence[str]], Job]
) -> int:
    """Print it; returns the exit status.

    Args:
        read: reads the job of this machine, if the flags start no launchers elsewhere.
    """
    if options.on == "ray":
        from rallypoint.cli.ray.on_ray import plan_on_ray

        _show_ray(plan_on_ray(options, command, os.environ))
    elif "--hosts" in options or "--hostfile" in options:
        _show_hosts(read_plan(options, command, os.environ))
    else:
        _show_job(read(options, command))
    return 0


def _show_job(job: Job) -> None:
    """Print the workers of a job on this node."""
    rendezvous = job.rendezvous
    if rendezvous is not None and rendezvous.backend in ELASTIC_BACKENDS:
        timeouts = read_timeouts(rendezvous.configuration, rendezvous.backend)
        job = with_silence(job, min(math.ceil(timeouts.silence_s), MOST_SILENCE_S))
    unknown = _unknown(job)
    seat = _seat(job)
    workers = [_variables(job, seat, local_rank) for local_rank in range(job.local_world_size)]
    shared = {
        name: text
        for name, text in workers[0].items()
        if name not in unknown and all(each.get(name) == text for each in workers)
    }
    print(f"{_BEGINNING}.", _place(job), "", "Each worker gets", sep="\n")
    _show_variables({**shared, **dict.fromkeys(unknown, _UNKNOWN)})
    for local_rank, variables in enumerate(workers):
        rank = _UNKNOWN if "RANK" in unknown else variables["RANK"]
        print(f"\nrank {rank}, local rank {local_rank}")
        known = {name: text for name, text in variables.items() if name not in unknown}
        _show_variables({name: text for name, text in known.items() if name not in shared})
        if job.cpus:
            print(f"  CPUs {','.join(map(str, sorted(job.cpus[local_rank])))}")
        print(printable(f"  {shlex.join(job.worker_command(local_rank))}"))
    if job.has_template:
        print(f"\nOne process imports {', '.join(job.preload)} and forks the workers.")
    if job.spares:
        print(f"\nand {job.spares} spare{'s' * (job.spares != 1)} to replace lost workers")


def _show_hosts(plan: Plan) -> None:
    """Print what --hosts would run where."""
    points = [f"{host.address}:{_UNKNOWN}" for host in plan.hosts]
    print(f"{_BEGINNING}, and no host is contacted.")
    _show_environ(plan)
    for number, host in enumerate(plan.hosts):
        shell = shlex.join(command_on(host.name, plan.rsh, NODE))
        print(printable(f"\nnode {number}, {host.name}\n  {shell}"))
        print(printable(f"  which starts: {_launcher(plan, number, points)}"))


def _show_ray(plan: Plan) -> None:
    """Print what --on ray would run on each node that it finds."""
    print(f"{_BEGINNING}, and Ray is not contacted.")
    _show_environ(plan)
    print(f"\n{_range(plan.fewest, plan.most)} nodes of the Ray cluster, of which node 0 would run")
    print(printable(f"  {_launcher(plan, 0, [f'{_UNKNOWN}:{_UNKNOWN}'])}"))


def _launcher(plan: Plan, number: int, points: Sequence[str]) -> str:
    return shlex.join(["python", *plan.options.launcher, *plan.words(number, points)])


def _show_environ(plan: Plan) -> None:
    environ = {**plan.environ, **({TOKEN: _SECRET} if TOKEN in plan.environ else {})}
    if environ:
        print("\nEach launcher gets")
        _show_variables(environ)


def _show_variables(variables: Mapping[str, str]) -> None:
    for name, text in sorted(variables.items()):
        shown = text if text in (_UNKNOWN, _SECRET) else shlex.quote(text)
        print(printable(f"  {name}={shown}"))


def _unknown(job: Job) -> list[str]:
    """The variables of a worker that are not known before the job starts."""
    found = ["TORCHELASTIC_ERROR_FILE"]
    rendezvous = job.rendezvous
    if rendezvous is None:
        return found if job.nodes.master_port else [*found, "MASTER_PORT"]
    if rendezvous.node_rank is None:
        found += _RANKS
    if rendezvous.min_nodes < rendezvous.max_nodes:
        found += _SIZES
    return [*found, *_MET]


def _nodes(job: Job) -> tuple[int, int]:
    """The node's rank, or 0 if it is unknown, and the greatest number of nodes."""
    rendezvous = job.rendezvous
    if rendezvous is None:
        return job.nodes.node_rank, job.nodes.count
    return rendezvous.node_rank or 0, rendezvous.max_nodes


def _seat(job: Job) -> Seat:
    """This node's place in the first round, if all nodes have as many workers."""
    node_rank, count = _nodes(job)
    members = [job.member.__replace__(key=str(rank), node_rank=rank) for rank in range(count)]
    store = Endpoint(host=job.nodes.master_addr, port=job.nodes.master_port or 1)
    return seats_of(tuple(members), number=0, store=store)[str(node_rank)]


def _variables(job: Job, seat: Seat, local_rank: int) -> dict[str, str]:
    """The variables of a worker that are not inherited as they are."""
    environ = worker_environ(job, place=seat.placements[local_rank], seat=seat, error_file=None)
    if TOKEN in environ:
        environ[TOKEN] = _SECRET
    for name in _OWN:
        environ.pop(name, None)
    return {name: text for name, text in environ.items() if job.environ.get(name) != text}


def _place(job: Job) -> str:
    """A sentence on the node."""
    node_rank, most = _nodes(job)
    name, count, where = str(node_rank), str(most), ""
    if job.rendezvous is not None:
        name = _UNKNOWN if job.rendezvous.node_rank is None else name
        count = _range(job.rendezvous.min_nodes, most)
        points = ", ".join(map(str, job.rendezvous.endpoints))
        where = f"; rendezvous at {points} ({job.rendezvous.backend})"
    workers = f"{job.local_world_size} worker{'s' * (job.local_world_size != 1)}"
    job_name = shown_name(job.run_id, job.command)
    return printable(f"Job {job_name}, node {name} of {count} ({job.host}), {workers}{where}.")


def _range(fewest: int, most: int) -> str:
    return str(most) if fewest == most else f"{fewest} to {most}"
