"""`rallypoint stacks`: the Python stacks of a running job's workers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rallypoint.base.json_records import to_json
from rallypoint.base.wording import name_ranks, printable
from rallypoint.cli.jobs import RunningJob, perform_on_job, rank_flag
from rallypoint.cli.options import HELP, Flag, Options
from rallypoint.diagnosis.facts import Stack, WorkerFacts
from rallypoint.launch.inspection.all_nodes import look_everywhere

PROGRAM = "rallypoint stacks"
_USAGE = f"""\
usage: {PROGRAM} [JOB] [FLAGS]

Print the stacks of the workers' Python threads, innermost call first; ranks with the same stacks
are printed together. It installs nothing, attaches no debugger, and takes a second or two.
"""


class _StacksOptions(Options):
    rank = rank_flag("only these ranks, as in 0,3")
    json = Flag.switch("print one JSON object per rank, for programs")
    help = HELP


def stacks(words: Sequence[str]) -> int:
    """Run `rallypoint stacks WORDS`; returns the exit status."""
    return perform_on_job(PROGRAM, words, _USAGE, _StacksOptions, _print_stacks)


def _print_stacks(job: RunningJob, options: _StacksOptions) -> int:
    ranks = options.rank
    looks = look_everywhere(job.agents)
    workers = [
        worker
        for node in looks.second.nodes
        for worker in node.workers
        if ranks is None or worker.rank in ranks
    ]
    if options.json:
        for worker in workers:
            told = {"rank": worker.rank, "because": worker.no_stacks_because or None}
            print(json.dumps({**told, "stacks": to_json(worker.stacks)}))
        return 0
    by_text: dict[str, list[int]] = {}
    for worker in workers:
        by_text.setdefault(stacks_text(worker), []).append(worker.rank)
    for text, same in by_text.items():
        print(printable(f"{name_ranks(same)}:\n{text}"))
    for note in looks.notes:
        print(printable(note))
    return 0


def stacks_text(worker: WorkerFacts) -> str:
    """Its stacks, or why there are none."""
    if worker.end is not None:
        return "  it has ended"
    if not worker.stacks:
        return f"  no stacks: {worker.no_stacks_because or 'it does not run Python'}"
    return "\n".join(_thread(stack) for stack in worker.stacks)


def _thread(stack: Stack) -> str:
    name = "main thread" if stack.is_main else f"thread {stack.name or stack.thread}"
    garbage = ", collecting garbage" if stack.collects_garbage else ""
    frames = [f"    {frame.file}:{frame.line} in {frame.function}" for frame in stack.frames]
    return "\n".join([f"  {name}{garbage}", *frames])
