"""`rallypoint stop`: end a running job, as its own Ctrl-C would.

A job that is not named is ended only on confirmation at a terminal, or with --only. The only job
that runs may belong to another person with the same account.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rallypoint.base.errors import HostError
from rallypoint.base.process_end import ProcessEnd
from rallypoint.base.wording import one_line, printable
from rallypoint.cli.jobs import RunningJob, perform_on_job
from rallypoint.cli.options import HELP, Flag, Options, UsageError
from rallypoint.launch.inspection.agent_client import NoAnswerError, ask, ask_status
from rallypoint.launch.inspection.entries import Found, shown_command
from rallypoint.launch.output.progress import duration

PROGRAM = "rallypoint stop"
_USAGE = f"""\
usage: {PROGRAM} [JOB] [FLAGS]

End a job on all its nodes: workers get SIGTERM, and those still running after --shutdown-timeout
are killed. It waits until no process of the job runs on this machine. Without JOB it asks first, at
a terminal; elsewhere it needs JOB or --only.
"""
_NOT_STOPPED = 1  # the exit status


class _StopOptions(Options):
    only = Flag.switch("without JOB: end the only job that runs here, without asking")
    no_wait = Flag.switch("ask the job to end, without waiting until it has")
    help = HELP


def stop(words: Sequence[str]) -> int:
    """Run `rallypoint stop WORDS`; returns the exit status."""
    return perform_on_job(PROGRAM, words, _USAGE, _StopOptions, _stop)


def _stop(job: RunningJob, options: _StopOptions) -> int:
    if not job.is_named and not options.only and not _is_confirmed(job):
        print(f"{PROGRAM}: nothing was stopped", file=sys.stderr)
        return _NOT_STOPPED
    asked = [agent for agent in job.agents if _ask_to_stop(agent)]
    if options.no_wait:
        return 0
    for agent in asked:
        _wait_for(agent.pid)
    print(printable(f"{job} has ended"), file=sys.stderr)
    return 0


def _is_confirmed(job: RunningJob) -> bool:
    """Whether a person at the terminal wants this one to end."""
    what = one_line(_description(job))
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"name the job: `{PROGRAM} {job.agents[0].pid}` ends {what}; --only ends"
            " the only job that runs here."
        )
    print(f"{PROGRAM}: end {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _description(job: RunningJob) -> str:
    """``job try (process 7: train.py -x; 4 ranks on 1 node, started 2:07 ago in /home/me)``."""
    agent = job.agents[0]
    directory = agent.about.get("directory", "")
    command = shown_command(agent.command, directory)
    try:
        status = ask_status(agent)
        size = f"{status.world_size} rank{'s' * (status.world_size != 1)} on {status.nodes}"
        size = f"{size} node{'s' * (status.nodes != 1)}" if status.round >= 0 else "no ranks yet"
    except HostError:
        size = "it does not answer"
    age = duration(max(0.0, time.time() - float(agent.about.get("began", "0"))))
    return (
        f"job {job.name} (process {agent.pid}: {command}; {size}, started {age} ago in {directory})"
    )


def _ask_to_stop(agent: Found) -> bool:
    """Ask the agent to stop; returns whether it was still running."""
    try:
        ask(agent, {"ask": "stop", "why": "`rallypoint stop`"})
    except NoAnswerError as error:
        if error.is_gone:
            return False
        raise HostError(
            f"{error} `kill -9 {agent.pid}` ends it at once, and its workers with it."
        ) from None
    return True


def _wait_for(pid: int) -> None:
    """Wait until that process has ended."""
    try:
        process = ProcessEnd(pid)
    except ProcessLookupError:
        return
    process.wait()
    process.close()
