"""`rallypoint run`: from the command line to the agent.

`python -m rallypoint.launch` is the same for callers of torch.distributed.launch, which is older
than torchrun: without --use-env, the script gets --local-rank=N as its first argument.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.port_range import VARIABLE as PORT_RANGE
from rallypoint.base.wording import printable
from rallypoint.cli.flags import PROGRAM, LegacyOptions, RunOptions
from rallypoint.cli.options import UsageError, describe, perform, selected
from rallypoint.cli.read_job import read_job
from rallypoint.launch.job import Job, Verbosity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.cli.beside_launcher import ProgramBeside

_KUBEFLOW = (
    "KUBEFLOW_TRAINER_SERVER_URL",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT",
    "KUBEFLOW_TRAINER_SERVER_TOKEN",
)
_LAST_REPORT_S = 12.0  # five until it may be sent, five until it is given up

# What --help shows; the lessons and torchrun's users need no more.
_COMMON = (
    *("--nproc-per-node", "--nnodes", "--module", "--max-restarts", "--on-hang"),
    *("--log-dir", "--redirects", "--tee", "--hosts", "--standalone", "--node-rank"),
    *("--master-addr", "--master-port"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    *("--dry-run", "--help-all", "--help", "--use-env"),
)

_INTRODUCTION = """\
usage: rallypoint run [FLAGS] SCRIPT [ARGUMENTS...]

Start SCRIPT in several processes, the workers. Each gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT and torchrun's other variables. When one fails, the launcher stops the others and
reports the first failure. When the launcher ends, for any reason, all workers end.
"""

_USAGE = """
  rallypoint run --nproc-per-node 4 train.py --epochs 10          four workers on this machine
  rallypoint run --nproc-per-node auto -m my_package.train        one for each GPU, or each CPU
  rallypoint run --hosts node1,node2 --nproc-per-node 8 train.py  two machines, over ssh

Everything after SCRIPT is passed to it.
"""

_FULL_USAGE = """
Four workers on this machine; one worker for each GPU, or for each CPU without GPUs:
  rallypoint run --nproc-per-node 4 train.py --epochs 10
  rallypoint run --nproc-per-node auto -m my_package.train

Output in files, and rank 0's here as well; up to three restarts of all workers after a failure:
  rallypoint run --nproc-per-node 8 --log-dir logs -r 3 -t 0:3 --max-restarts 3 train.py

Two machines, each with its own --node-rank, and both with the same token:
  RALLYPOINT_TOKEN=... rallypoint run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 \\
      --nproc-per-node 8 train.py

Three machines with one command, over ssh; when it ends, for any reason, all of them end:
  rallypoint run --hosts node1,node2,node3:4 --nproc-per-node 8 train.py

Two to four nodes of a Ray cluster, from one of them or with `ray job submit`:
  rallypoint run --on ray --nnodes 2:4 --nproc-per-node 8 train.py

Everything after SCRIPT is passed to it unchanged, except that ${local_rank} is replaced.
"""

_ENDING = """
Each flag can also be spelled with '_', or set by a variable, as in PET_NPROC_PER_NODE=4.
PYTHON_EXEC names the Python that runs SCRIPT (default: this one). With several workers,
OMP_NUM_THREADS is 1 unless you set it. If TORCHELASTIC_ERROR_FILE is set here, the error of the
worker that failed first is written to that file as JSON.

Exit status: 0 if every worker succeeded; 1 if one failed; 2 if the command line is wrong;
3 if the job succeeded before this machine could take part;
128 + the signal's number if a signal stopped the launcher (a second Ctrl-C kills at once).

Unlike torchrun: flags cannot be abbreviated, $$ and $local_rank in arguments stay unchanged, each
restart has an empty store, SIGUSR1 and SIGUSR2 are forwarded and stop nothing unless they are in
--signals-to-handle, and logs are written only if you ask for them."""


def run(words: Sequence[str], table: type[RunOptions] = RunOptions) -> int:
    """Run `rallypoint run WORDS`; returns the exit status."""
    statuses = ((InvalidArgumentError, 2), (HostError, 1))
    return perform(
        PROGRAM,
        words,
        table,
        _run,
        usage=_INTRODUCTION + _USAGE,
        groups=selected(table.groups, _COMMON),
        environ=os.environ,
        statuses=statuses,
    )


def launch(words: Sequence[str]) -> int:
    """Run `python -m rallypoint.launch WORDS`; returns the exit status."""
    try:
        return run(words, LegacyOptions)
    except KeyboardInterrupt:  # before the agent could handle it
        return 130


def _run(options: RunOptions, command: list[str]) -> int:
    if options.help_all:
        print(_INTRODUCTION + _FULL_USAGE, describe(options.groups), _ENDING, sep="\n")
        return 0
    if "--print-completion" in options:
        from rallypoint.cli.completion import script_for

        print(script_for(options.print_completion), end="")
        return 0
    if options.dry_run:
        from rallypoint.cli.dry_run import dry_run

        return dry_run(options, command, read_with_notes)
    if options.on == "ray":
        from rallypoint.cli.ray.on_ray import run_on_ray

        return run_on_ray(options, command)
    if "--hosts" in options or "--hostfile" in options:
        from rallypoint.cli.remote.starter import run_on_hosts

        return run_on_hosts(options, command)
    job = read_with_notes(options, command)
    if PORT_RANGE in job.environ:
        os.environ[PORT_RANGE] = job.environ[PORT_RANGE]  # for this process's own ports
    reporter = _start_beside(options, job)
    from rallypoint.launch.agent.loop import run as run_job

    status = 1
    try:
        status = run_job(job)
    finally:
        if reporter is not None:
            reporter.finish(str(status), _LAST_REPORT_S)
    return status


def _start_beside(options: RunOptions, job: Job) -> ProgramBeside | None:
    """Start what the flags request; returns the program that reports to Kubeflow, if any."""
    if options.metrics:
        from rallypoint.cli.metrics import start_beside_launcher

        note = start_beside_launcher(options.metrics, is_public=options.metrics_public)
        if job.verbosity is not Verbosity.QUIET:
            print(printable(f"{PROGRAM}: {note}"), file=sys.stderr)
    server = [os.environ.get(name, "") for name in _KUBEFLOW]
    if options.kubeflow_status == "on" and not all(server):
        raise UsageError(
            f"--kubeflow-status is on, but {', '.join(_KUBEFLOW)} are not all set; Kubeflow Trainer"
            " sets them from 2.2 on, with its feature gate TrainJobStatus."
        )
    meeting, me = job.rendezvous, str(os.getpid())
    is_first = not (job.nodes.node_rank if meeting is None else meeting.node_rank)
    # Where nodes may come and go, another one may become the first.
    is_ever_first = is_first or (meeting is not None and meeting.min_nodes < meeting.max_nodes)
    reports = all(server) and options.kubeflow_status != "off" and is_ever_first
    shows_page = options.page and is_first
    if not (reports or shows_page):
        return None
    from rallypoint.cli.beside_launcher import ProgramBeside

    if shows_page:
        page = ProgramBeside("rallypoint.cli.page", (me, options.page), answers=True)
        print(printable(f"{PROGRAM}: the page of this job: {page.answer}"), file=sys.stderr)
    if not reports:
        return None
    words = (me, options.kubeflow_status, *server)
    return ProgramBeside("rallypoint.cli.kubeflow", words, shows_errors=True)


def read_with_notes(options: RunOptions, command: Sequence[str]) -> Job:
    """The job of this machine; notes on its flags are printed, unless --quiet is given."""
    job, notes = read_job(options, command, os.environ)
    if job.verbosity is not Verbosity.QUIET:
        for note in [*notes, *note_on_threads(job), *_note_on_loopback(job)]:
            print(printable(f"{PROGRAM}: {note}"), file=sys.stderr)
    return job


def note_on_threads(job: Job) -> list[str]:
    """A note if the OMP_NUM_THREADS=1 that workers get leaves CPUs idle."""
    cpus, workers = len(os.sched_getaffinity(0)), job.local_world_size
    if workers == 1 or "OMP_NUM_THREADS" in job.environ or cpus < 2 * workers:
        return []
    return [
        "each worker gets OMP_NUM_THREADS=1, as with torchrun; set it yourself, to"
        f" {cpus // workers} for {cpus} CPUs and {workers} workers, if one thread is too few"
    ]


def _note_on_loopback(job: Job) -> list[str]:
    """A note if the workers cannot reach their store: one that waits for it may say nothing."""
    if job.nodes.count > 1 or job.rendezvous is not None:
        return []
    from rallypoint.base.address import loopback_trouble

    trouble = loopback_trouble("127.0.0.1")
    return [trouble] if trouble else []
