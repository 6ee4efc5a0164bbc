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
from rallypoint.cli.flags import ENDINGS, PROGRAM, USAGE, LegacyOptions, RunOptions
from rallypoint.cli.options import perform
from rallypoint.cli.read_job import read_job
from rallypoint.launch.job import Job, Verbosity


def run(words: Sequence[str], table: type[RunOptions] = RunOptions) -> int:
    """Run `rallypoint run WORDS`; returns the exit status."""
    statuses = ((InvalidArgumentError, 2), (HostError, 1))
    environ = os.environ
    return perform(
        PROGRAM, words, table, _run, usage=USAGE, ending=ENDINGS, environ=environ, statuses=statuses
    )


def launch(words: Sequence[str]) -> int:
    """Run `python -m rallypoint.launch WORDS`; returns the exit status."""
    try:
        return run(words, LegacyOptions)
    except KeyboardInterrupt:  # before the agent could handle it
        return 130


def _run(options: RunOptions, command: list[str]) -> int:
    if "--print-completion" in options:
        from rallypoint.cli.completion import completion

        print(completion(options.print_completion, options.flags.values()), end="")
        return 0
    if options.on == "ray":
        from rallypoint.cli.ray.on_ray import run_on_ray

        return run_on_ray(options, command)
    if "--hosts" in options or "--hostfile" in options:
        from rallypoint.cli.remote.starter import run_on_hosts

        return run_on_hosts(options, command)
    job, notes = read_job(options, command, os.environ)
    if PORT_RANGE in job.environ:
        os.environ[PORT_RANGE] = job.environ[PORT_RANGE]  # for this process's own ports
    if job.verbosity is not Verbosity.QUIET:
        for note in [*notes, *note_on_threads(job), *_note_on_loopback(job)]:
            print(printable(f"{PROGRAM}: {note}"), file=sys.stderr)
    from rallypoint.launch.agent.loop import run as run_job

    return run_job(job)


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
