"""`rallypoint status`: what each worker of a running job is doing."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.recorded_call import RecordedCall
from rallypoint.base.recorded_steps import steps_of_job
from rallypoint.base.wording import brief, how_ended, name_ranks, printable, table
from rallypoint.cli.jobs import RunningJob, perform_on_job
from rallypoint.cli.options import HELP, Options
from rallypoint.diagnosis.activity import current_site
from rallypoint.diagnosis.facts import Node, WorkerFacts
from rallypoint.launch.inspection.all_nodes import look_everywhere
from rallypoint.launch.inspection.requests import AgentStatus
from rallypoint.launch.output.progress import duration, step_text

PROGRAM = "rallypoint status"
_USAGE = f"""\
usage: {PROGRAM} [JOB]

Show the state of a job: a line for each worker on all its nodes, with what it is doing, for how
long, and where in its program. It takes about a second. `rallypoint explain` shows why a job hangs.
"""
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "in the kernel",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
}
_HEAD = ("RANK", "NODE", "PID", "STATE", "CPU", "MEMORY", "CALL", "AT")


class _StatusOptions(Options):
    help = HELP


def status(words: Sequence[str]) -> int:
    """Run `rallypoint status WORDS`; returns the exit status."""
    return perform_on_job(PROGRAM, words, _USAGE, _StatusOptions, _tell)


def _tell(job: RunningJob, _: _StatusOptions) -> int:
    looks = look_everywhere(job.agents)
    print(printable(_title(job.name, looks.status)))
    nodes = looks.second.nodes
    steps = steps_of_job(worker.steps for node in nodes for worker in node.workers)
    if steps is not None:
        pace = f", {brief(steps.step_s)} for each step" if steps.step_s is not None else ""
        print(f"{step_text(steps)}{pace}")
    rows = [_row(worker, node) for node in nodes for worker in node.workers]
    if rows:
        print(*table(_HEAD, rows, right="r r rr"), sep="\n")
    for node in nodes:
        if node.silent_s is not None:
            silent = f"has not answered for {brief(node.silent_s)}: {name_ranks(node.ranks)}"
            print(printable(f"node {node.node_rank} ({node.host}) {silent}"))
    for note in looks.notes:
        print(printable(note))
    return 0


def _title(name: str, told: AgentStatus) -> str:
    if told.round < 0:
        waiting = f": {told.news}" if told.news else ""
        return f"job {name}: no round yet, after {duration(told.uptime_s)}{waiting}"
    return (
        f"job {name}: round {told.round}, {told.world_size} ranks on {told.nodes}"
        f" node{'s' * (told.nodes != 1)}; {told.phase}, {duration(told.uptime_s)} after its start"
    )


def _row(worker: WorkerFacts, node: Node) -> tuple[str, ...]:
    call, text = _call(worker, node.now_ns)
    process, end = worker.process, worker.end
    where = (str(worker.rank), node.host)
    if end is not None:
        return (*where, "-", how_ended(end.code, end.signal), "", "", text, "")
    if process is None:
        return (*where, "-", "not started", "", "", "", "")
    return (
        *where,
        str(process.pid),
        _STATES.get(process.state, process.state),
        f"{process.cpu * 100:.0f} %",
        f"{process.rss_bytes / 1e6:.0f} MB",
        text,
        _site(worker, call),
    )


def _site(worker: WorkerFacts, call: RecordedCall | None) -> str:
    """The line of its program in which it is, or made its last call."""
    if call is not None and call.state == "running" and call.site:
        return call.site
    return current_site(worker) or (call.site if call is not None else "")


def _call(worker: WorkerFacts, now_ns: int) -> tuple[RecordedCall | None, str]:
    """The worker's current call, or its last one, and a description of it."""
    calls = [call for group in worker.groups for call in (*group.calls[-1:], *group.transfers)]
    running = [call for call in calls if call.state == "running"]
    if running:
        call = min(running, key=lambda each: each.since_ns)  # the one that has lasted longest
        return call, f"{_name(call)} for {_since(call, now_ns)}"
    if calls:
        call = max(calls, key=lambda each: each.since_ns)
        return call, f"after {_name(call)}, {_since(call, now_ns)} ago"
    return None, ""


def _since(call: RecordedCall, now_ns: int) -> str:
    return brief(max(0.0, (now_ns - call.since_ns) / 1e9))  # calls are read after the clock


def _name(call: RecordedCall) -> str:
    return call.operation if call.peer is not None else f"{call.operation} #{call.number}"
