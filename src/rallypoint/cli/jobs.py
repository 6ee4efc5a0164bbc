"""The common part of commands about one running job: which one.

A job is selected by its name, the beginning of its name, or its launcher's process number; without
any, it is the only job running on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from shlex import quote

from rallypoint.base.errors import HostError, RallypointError
from rallypoint.cli.options import Flag, Options, UsageError, integer, perform, reader
from rallypoint.launch.inspection.ended_job import latest_ended
from rallypoint.launch.inspection.entries import Found, running_agents
from rallypoint.launch.output.progress import duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    Table = TypeVar("Table", bound=Options)

_KEPT_S, _LOOK_AGAIN_S = 2.0, 0.05  # until what is kept of a job is there
NO_SUCH_JOB = 5  # the exit status; docs/exit-statuses.md
JOB_HELP = """\
JOB is the job's name (--rdzv-id, or as `rallypoint ps` shows it), the beginning of its name, or the
pid of its launcher. It may be left out if only one job runs on this machine.
"""


class NoSuchJobError(RallypointError):
    """There is no job of that name on this machine, or no job at all."""


class JobEndedError(HostError):
    """The job has ended before it could be shown."""


class RunningJob:
    """A job running on this machine.

    Attributes:
        name: as it is shown.
        agents: its agents on this machine; nearly always one.
        is_named: whether the command line names it.
    """

    def __init__(self, agents: Sequence[Found]) -> None:
        self.agents = tuple(agents)
        self.run_id = agents[0].run_id
        self.name = agents[0].name
        self.is_named = False

    def __str__(self) -> str:
        return f"job {self.name} (process {self.agents[0].pid})"


def running_jobs() -> list[RunningJob]:
    """The jobs running on this machine, the oldest first."""
    by_job: dict[tuple[str, str], list[Found]] = {}
    for agent in running_agents():
        by_job.setdefault(agent.job, []).append(agent)
    return [RunningJob(agents) for agents in by_job.values()]


def choose_job(word: str, jobs: Sequence[RunningJob]) -> RunningJob:
    """The job that `word` selects, of those that run; if empty, the only one."""
    found = _matching(word, jobs)
    if not found:
        raise NoSuchJobError(_not_found(word, jobs))
    if len(found) > 1:
        which = f"{word!r} matches several jobs" if word else "several jobs run here"
        by = "name or pid" if len({job.name for job in found}) == len(found) else "pid"
        raise UsageError(f"{which}; choose one by its {by}: {_listed(found)}.")
    return found[0]


def rank_flag(help: str) -> Flag[frozenset[int], None]:  # noqa: A002 - as in Flag
    """The flag --rank; None if it is not given."""
    read = reader(
        lambda text: frozenset(map(integer, text.split(","))),
        "{name} is {text!r}; it must be ranks, as in 0,3.",
    )
    return Flag(help, "RANKS", read, None, short="-r")


def perform_on_job(
    program: str,
    words: Sequence[str],
    usage: str,
    options: type[Table],
    act: Callable[[RunningJob, Table], int],
    act_on_ended: Callable[[str, Table], int | None] | None = None,
) -> int:
    """Run a command about one job; returns the exit status.

    Args:
        act_on_ended: called if no job of that name is running, or it ends before it was shown;
            returns None if it knows none either.
    """

    def choose_and_act(options: Table, rest: list[str]) -> int:
        if rest[1:]:
            raise UsageError(f"it takes only one job; leave out {rest[1]!r}.")
        word = rest[0] if rest else ""
        options.check_values()
        jobs = running_jobs()
        if act_on_ended and not _matching(word, jobs):
            status = act_on_ended(word, options)
            if status is not None:
                return status
        chosen = choose_job(word, jobs)
        chosen.is_named = bool(word)
        try:
            return act(chosen, options)
        except JobEndedError:
            status, until = None, time.monotonic() + _KEPT_S
            while act_on_ended and status is None and time.monotonic() < until:
                time.sleep(_LOOK_AGAIN_S)
                status = act_on_ended(str(chosen.agents[0].pid), options)
            if status is None:
                raise
            return status

    return perform(
        program,
        words,
        options,
        choose_and_act,
        usage=f"{usage}\n{JOB_HELP}",
        statuses=((NoSuchJobError, NO_SUCH_JOB), (HostError, 1)),
        has_subject=True,
    )


def _matching(word: str, jobs: Sequence[RunningJob]) -> list[RunningJob]:
    if not word:
        return list(jobs)
    by_process = [job for job in jobs if word in [str(agent.pid) for agent in job.agents]]
    by_name = [job for job in jobs if word in (job.run_id, job.name)]
    begun = [job for job in jobs if job.run_id.startswith(word) or job.name.startswith(word)]
    return by_process or by_name or begun


def _not_found(word: str, jobs: Sequence[RunningJob]) -> str:
    """Why no job is found: it has ended, or this machine knows none of that name."""
    here = f"no job {word or 'of yours'} runs on this machine"
    if kept := latest_ended(word):
        job, _ = kept
        ago = duration(max(0.0, time.time() - job.ended))
        subject = job.name if word else f"{here}; the last one, {job.name},"
        command = f"rallypoint top {quote(word)}" if word else "rallypoint top"
        return f"{subject} ended {ago} ago with status {job.status}; see: {command}"
    step = f"running jobs: {_listed(jobs)}" if jobs else "run this on a machine of the job"
    return f"{here}, and none has ended that this machine knows of; {step}."


def _listed(jobs: Sequence[RunningJob]) -> str:
    return ", ".join(f"{job.name} ({job.agents[0].pid})" for job in jobs[:8])
