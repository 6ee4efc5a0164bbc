"""`rallypoint stop`: end a running job, as its own Ctrl-C would."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rallypoint.base.errors import HostError
from rallypoint.base.process_end import ProcessEnd
from rallypoint.cli.jobs.choice import RunningJob, perform
from rallypoint.cli.options import Flag
from rallypoint.launch.inspection.client import NoAnswerError, ask
from rallypoint.launch.inspection.entries import Found

PROGRAM = "rallypoint stop"
_FLAGS = (Flag("--no-wait", "ask the job to end, without waiting until it has"),)
_USAGE = f"""\
usage: {PROGRAM} [JOB] [FLAGS]

End a job on all its nodes: workers get SIGTERM, and those still running after --shutdown-timeout
are killed. It waits until no process of the job runs on this machine.
"""


def stop(words: Sequence[str]) -> int:
    """Run `rallypoint stop WORDS`; returns the exit status."""
    return perform(PROGRAM, words, _USAGE, _FLAGS, _stop)


def _stop(job: RunningJob, values: Mapping[str, str]) -> int:
    asked = [agent for agent in job.agents if _ask_to_stop(agent)]
    if "--no-wait" in values:
        return 0
    for agent in asked:
        _wait_for(agent.pid)
    print(f"{job} has ended", file=sys.stderr)
    return 0


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
