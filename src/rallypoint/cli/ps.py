"""`rallypoint ps`: lists the jobs running on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from rallypoint.base.errors import HostError
from rallypoint.base.wording import name_ranks, one_line, table
from rallypoint.cli.jobs import running_jobs
from rallypoint.cli.options import HELP, Flag, Options, perform, refuse_words
from rallypoint.launch.inspection.agent_client import NoAnswerError, ask_status
from rallypoint.launch.inspection.ended_job import EndedJob, ended_jobs
from rallypoint.launch.inspection.entries import Found, shown_command
from rallypoint.launch.output.progress import duration, share

PROGRAM = "rallypoint ps"
_USAGE = f"""\
usage: {PROGRAM} [FLAGS]

List your jobs that run on this machine: name, launcher process, and workers here. A job on several
machines is listed on each of them. --all adds jobs that have ended: how, after which time and
step, and the share of the time in which they trained.
"""
_TIMEOUT_S = 0.5


class _PsOptions(Options):
    all = Flag.switch("also list the last hundred jobs that have ended", "-a")
    json = Flag.switch("print one JSON object per job, for programs")
    quiet = Flag.switch("print only the jobs' names", "-q")
    help = HELP


def ps(words: Sequence[str]) -> int:
    """Run `rallypoint ps WORDS`; returns the exit status."""
    return perform(PROGRAM, words, _PsOptions, _list, usage=_USAGE)


def _list(options: _PsOptions, rest: list[str]) -> int:
    refuse_words(rest)
    ended = list(ended_jobs()) if options.all else []
    if options.quiet:
        names = [*(job.name for job in running_jobs()), *(job.name for job in ended)]
        print("".join(f"{one_line(name)}\n" for name in dict.fromkeys(names)), end="")
        return 0
    found = [
        (row, shown_command(agent.command, agent.about.get("directory", "")))
        for job in running_jobs()
        for agent in job.agents
        if (row := _row(agent)) is not None
    ]
    if options.json:
        for row in [*(row for row, _ in found), *map(_ended_row, ended)]:
            print(json.dumps(row))
        return 0
    if found:
        head = ("JOB", "PID", "NODE", "RANKS", "ROUND", "RUNS FOR", "COMMAND")
        print(*table(head, [_cells(*each) for each in found], right=" r  rr "), sep="\n")
    else:
        print("no job of yours runs on this machine")
    if ended:
        columns = ("JOB", "PID", "ENDED", "EXIT", "RAN FOR", "STEP", "TRAINED", "COMMAND")
        print("", *table(columns, [*map(_ended_cells, ended)], right=" r rrrr "), sep="\n")
    return 0


def _row(agent: Found) -> dict[str, object] | None:
    row: dict[str, object] = {
        "run_id": agent.run_id,
        "name": agent.name,
        "pid": agent.pid,
        "command": " ".join(agent.command),
        "began": float(agent.about.get("began", "0")),
        "directory": agent.about.get("directory", ""),
        "logs": agent.about.get("logs") or None,
        "nnodes": agent.about.get("nnodes", ""),
    }
    try:
        status = ask_status(agent, timeout_s=_TIMEOUT_S)
    except NoAnswerError as error:
        return None if error.is_gone else {**row, "trouble": "does not answer"}
    except HostError as error:
        return {**row, "trouble": str(error)}
    return {
        **row,
        "node_rank": status.node_rank,
        "nodes": status.nodes,
        "round": status.round,
        "phase": status.phase,
        "ranks": [each.rank for each in status.running],
        "uptime_s": round(status.uptime_s, 3),
    }


def _ended_row(job: EndedJob) -> dict[str, object]:
    return {
        "run_id": job.run_id,
        "name": job.name,
        "pid": job.pid,
        "command": " ".join(job.command),
        "host": job.host,
        "node_rank": job.node_rank,
        "nodes": job.nodes,
        "round": job.round,
        "phase": "ended",
        "ended": job.ended,
        "uptime_s": round(job.uptime_s, 3),
        "status": job.status,
        "step": job.step,
        "total": job.total,
        "trained": job.so_far.trained_share(job.uptime_s),
        "losses": job.so_far.loss_count,
        "restarts": job.so_far.restarts,
    }


def _ended_cells(job: EndedJob) -> tuple[str, ...]:
    trained = job.so_far.trained_share(job.uptime_s)
    return (
        job.name,
        str(job.pid),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(job.ended)),
        str(job.status),
        duration(job.uptime_s),
        "" if job.step is None else f"{job.step:,}",
        "" if trained is None else share(trained),
        shown_command(job.command),
    )


def _cells(row: dict[str, object], command: str) -> tuple[str, ...]:
    if "trouble" in row:
        return (str(row["name"]), str(row["pid"]), "?", str(row["trouble"]), "", "", command)
    ranks, round_number = row["ranks"], row["round"]
    assert isinstance(ranks, list)
    return (
        str(row["name"]),
        str(row["pid"]),
        f"{row['node_rank']} of {row['nodes'] or row['nnodes']}",
        name_ranks(ranks).partition(" ")[2] if ranks else "none",
        str(round_number) if round_number != -1 else "-",
        duration(float(str(row["uptime_s"]))),
        command,
    )
