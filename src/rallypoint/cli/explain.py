"""`rallypoint explain`: why a job is stuck, slow or dead, in one sentence.

launch/inspection/ looks at the job, diagnosis/ concludes.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from itertools import islice

from rallypoint.base.files import open_regular
from rallypoint.base.wording import printable
from rallypoint.cli.jobs import RunningJob, perform_on_job
from rallypoint.cli.options import HELP, JSON, Flag, Options
from rallypoint.diagnosis.answer import explanation_of
from rallypoint.diagnosis.explanation import Explanation, Verdict
from rallypoint.diagnosis.stragglers import is_open, lateness, readings
from rallypoint.launch.inspection.all_nodes import look_everywhere
from rallypoint.launch.inspection.entries import shown_command
from rallypoint.launch.inspection.saved_job import latest_kept

PROGRAM = "rallypoint explain"
_PLACE = re.compile(r"^rank \d+ is in [^(]*\((/[^()]+):(\d+)\)")
_MOST_SOURCE = 100  # characters
_MOST_SAMPLES = 8
_USAGE = f"""\
usage: {PROGRAM} [JOB] [FLAGS]

Explain why a job hangs: which rank the others wait for, what it is doing, at which line of its
program, and for how long. This works with any backend of torch.distributed, and on workers that are
dead, stopped or hold the GIL. It changes nothing and takes a second or two. If no such job is
running, it explains the job that failed last on this machine.

The exit status is 0 if nothing hangs, 3 if the job hangs and the reason was found, 4 if it was not,
and 5 if there is no such job.
"""


class _ExplainOptions(Options):
    why = Flag.switch("also print the evidence: who waits for whom, and where")
    json = JSON
    help = HELP


def explain(words: Sequence[str]) -> int:
    """Run `rallypoint explain WORDS`; returns the exit status."""
    return perform_on_job(PROGRAM, words, _USAGE, _ExplainOptions, _explain_running, _explain_ended)


def _explain_running(job: RunningJob, options: _ExplainOptions) -> int:
    looks = look_everywhere(job.agents)
    samples = [looks.first, looks.second]
    found = explanation_of(*samples)
    while (
        found.kind is Verdict.NO_HANG
        and len(samples) < _MOST_SAMPLES
        and is_open(lateness(readings(samples[0]), readings(samples[-1])))
    ):  # a rank seems to be slow: a longer time will tell
        looks = look_everywhere(job.agents)
        samples += [looks.first, looks.second]
        found = explanation_of(*samples)
    return _tell(found, looks.second.run_id, looks.notes, options)


def _explain_ended(word: str, options: _ExplainOptions) -> int | None:
    """Explain the latest failed job of that name; None if there is none."""
    job = latest_kept(word)
    if job is None:
        return None
    name = f"job {job.name} (process {job.pid}: {shown_command(job.command)})"
    notes = [f"{name} ended at {_time(job.ended)} with exit status {job.status}"]
    notes += [f"the launcher stopped it, because {job.hang}"] if job.hang else []
    if not word and not options.json:  # the user did not name this job
        print(printable(f"no job runs here; the last record: {notes.pop(0)}:"))
    return _tell(job.explained(), job.facts.run_id, notes, options)


def _tell(found: Explanation, run_id: str, notes: Sequence[str], options: _ExplainOptions) -> int:
    if options.json:
        print(json.dumps({"run_id": run_id, **found.to_json(), "notes": list(notes)}))
        return found.exit_status
    print(printable(found.sentence))
    for line in [*found.evidence, *notes] if options.why else notes:
        print(printable(f"  {line}{_source(line)}"))
    return found.exit_status


def _source(line: str) -> str:
    """The source line that the evidence names, if the file is on this machine."""
    place = _PLACE.search(line)
    if place is None:
        return ""
    try:
        with os.fdopen(open_regular(place[1]), encoding="utf-8", errors="replace") as file:
            text = next(islice(file, int(place[2]) - 1, None), "").strip()
    except OSError:
        return ""
    return f": {text[:_MOST_SOURCE]}" if text else ""


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
