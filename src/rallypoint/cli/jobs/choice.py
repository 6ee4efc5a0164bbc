"""Selects the job that a command is about; the common part of such commands.

A job is selected by its name, the beginning of its name, or its launcher's process number; without
any, it is the only job running on this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.errors import HostError, RallypointError
from rallypoint.base.wording import printable
from rallypoint.cli.number_flags import is_whole
from rallypoint.cli.options import HELP, Flag, UsageError, describe, parse
from rallypoint.launch.inspection.entries import Found, running_agents

NAMED = "JOB"  # among the values of a command's flags, if it names its job
NO_SUCH_JOB = 5  # the exit status; docs/exit-statuses.md
JOB_HELP = """\
JOB is the job's name (--rdzv-id), the beginning of its name, or the pid of its launcher. It may be
left out if only one job runs on this machine. `rallypoint ps` lists them.
"""


class NoSuchJobError(RallypointError):
    """There is no job of that name on this machine, or no job at all."""


class RunningJob:
    """A job running on this machine.

    Attributes:
        agents: its agents on this machine; nearly always one.
    """

    def __init__(self, agents: Sequence[Found]) -> None:
        self.agents = tuple(agents)
        self.run_id = agents[0].run_id

    def __str__(self) -> str:
        return f"job {self.run_id} (process {self.agents[0].pid})"


def running_jobs() -> list[RunningJob]:
    """The jobs running on this machine, the oldest first."""
    by_job: dict[tuple[str, str], list[Found]] = {}
    for agent in running_agents():
        by_job.setdefault(agent.job, []).append(agent)
    return [RunningJob(agents) for agents in by_job.values()]


def choose_job(word: str, jobs: Sequence[RunningJob]) -> RunningJob:
    """The job that `word` selects; if empty, the only job.

    Raises:
        NoSuchJobError: there is none.
        UsageError: there are several.
    """
    if not jobs:
        text = "no job of yours runs on this machine; run this on a machine of the job."
        raise NoSuchJobError(text)
    found = _matching(word, jobs)
    if not found:
        raise NoSuchJobError(f"no job {word} runs on this machine; running jobs: {_listed(jobs)}.")
    if len(found) > 1:
        which = f"{word!r} matches several jobs" if word else "several jobs run here"
        raise UsageError(f"{which}; choose one by its pid: {_listed(found)}.")
    return found[0]


def read_ranks(program: str, values: Mapping[str, str]) -> frozenset[int] | None:
    """The ranks given by --rank; None if it is not given.

    Raises:
        UsageError: the value is malformed.
    """
    text = values.get("--rank")
    if text is None:
        return None
    if not all(is_whole(each) for each in text.split(",")):
        raise UsageError(f"{program}: --rank is {text!r}; it must be ranks, as in 0,3.")
    return frozenset(map(int, text.split(",")))


def perform(
    program: str,
    words: Sequence[str],
    usage: str,
    flags: Sequence[Flag],
    act: Callable[[RunningJob, Mapping[str, str]], int],
    act_on_ended: Callable[[str, Mapping[str, str]], int | None] = lambda word, values: None,
) -> int:
    """Run a command about one job; returns the exit status.

    Args:
        act: called with the job and the values of the flags; also of NAMED, if that is given.
        act_on_ended: called if no job of that name is running; returns None if it knows none
            either.
    """
    flags = (*flags, HELP)
    try:
        values, job = parse(words, flags, program=program, environ={})
        after, extra = parse(job[1:], flags, program=program, environ={})  # flags may follow
        values |= after
        if "--help" in values:
            print(usage, JOB_HELP, describe(flags), sep="\n")
            return 0
        if extra:
            raise UsageError(f"{program}: it takes only one job; leave out {extra[0]!r}.")
        word = job[0] if job else ""
        try:
            chosen = choose_job(word, running_jobs())
        except NoSuchJobError:
            status = act_on_ended(word, values)
            if status is None:
                raise
            return status
        return act(chosen, {**values, NAMED: word} if word else values)
    except UsageError as error:
        return _refuse(program, error, 2)
    except NoSuchJobError as error:
        return _refuse(program, error, NO_SUCH_JOB)
    except HostError as error:
        return _refuse(program, error, 1)


def _matching(word: str, jobs: Sequence[RunningJob]) -> list[RunningJob]:
    if not word:
        return list(jobs)
    by_process = [job for job in jobs if word in [str(agent.pid) for agent in job.agents]]
    by_name = [job for job in jobs if job.run_id == word]
    return by_process or by_name or [job for job in jobs if job.run_id.startswith(word)]


def _listed(jobs: Sequence[RunningJob]) -> str:
    return ", ".join(f"{job.run_id} ({job.agents[0].pid})" for job in jobs[:8])


def _refuse(program: str, error: Exception, status: int) -> int:
    text = printable(str(error).removeprefix(f"{program}: "))
    print(f"{program}: {text}", file=sys.stderr)
    return status
