"""`rallypoint ps`: lists the jobs running on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rallypoint.base.errors import HostError
from rallypoint.base.wording import name_ranks, one_line, table
from rallypoint.cli.jobs import running_jobs
from rallypoint.cli.options import HELP, Flag, Options, perform, refuse_words
from rallypoint.launch.inspection.agent_client import NoAnswerError, ask_status
from rallypoint.launch.inspection.entries import Found, shown_command
from rallypoint.launch.output.progress import duration

PROGRAM = "rallypoint ps"
_USAGE = f"""\
usage: {PROGRAM} [FLAGS]

List your jobs that run on this machine: name, launcher process, and workers here. A job on several
machines is listed on each of them.
"""
_TIMEOUT_S = 0.5


class _PsOptions(Options):
    json = Flag.switch("print one JSON object per job, for programs")
    quiet = Flag.switch("print only the jobs' names", "-q")
    help = HELP


def ps(words: Sequence[str]) -> int:
    """Run `rallypoint ps WORDS`; returns the exit status."""
    return perform(PROGRAM, words, _PsOptions, _list, usage=_USAGE)


def _list(options: _PsOptions, rest: list[str]) -> int:
    refuse_words(rest)
    if options.quiet:
        print("".join(f"{one_line(job.name)}\n" for job in running_jobs()), end="")
        return 0
    found = [
        (row, shown_command(agent.command, agent.about.get("directory", "")))
        for job in running_jobs()
        for agent in job.agents
        if (row := _row(agent)) is not None
    ]
    if options.json:
        for row, _ in found:
            print(json.dumps(row))
    elif found:
        head = ("JOB", "PID", "NODE", "RANKS", "ROUND", "RUNS FOR", "COMMAND")
        print(*table(head, [_cells(*each) for each in found], right=" r  rr "), sep="\n")
    else:
        print("no job of yours runs on this machine")
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
