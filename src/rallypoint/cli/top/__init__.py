"""`rallypoint top`: a job as it runs, in a terminal: which rank is slow, and which one is stuck.

launch/inspection/job_follower.py follows the job, diagnosis/job_view.py says what there is to see,
frame.py draws it, and screen.py shows it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from shutil import get_terminal_size

from rallypoint.base.wording import one_line, printable
from rallypoint.cli.jobs import RunningJob, perform_on_job
from rallypoint.cli.options import HELP, Flag, Options
from rallypoint.cli.top.browser import Browser
from rallypoint.cli.top.frame import Choices, event_text, frame
from rallypoint.cli.top.screen import Screen
from rallypoint.cli.watching import view_json, view_of_ended, view_once
from rallypoint.diagnosis.job_view import JobView, view_of
from rallypoint.launch.inspection.ended_job import EndedJob, latest_ended
from rallypoint.launch.inspection.job_follower import follow

PROGRAM = "rallypoint top"
_USAGE = f"""\
usage: {PROGRAM} [JOB] [FLAGS]

Watch a running job: its speed, a line for each rank on all its nodes, and in one sentence which
rank is slow, or why the job is stuck. The key ? explains the rest, and q ends it. Nothing is
changed in the job, and it costs its machines some milliseconds a second, only while you watch.

Without a terminal, or with --once, it prints one screen after about two seconds. If no such job is
running, it prints how the last one of that name has ended, and what happened in it.
"""
_MOST_EVENTS = 20  # of a job that has ended
_WIDE = 160  # columns where no terminal says how many there are


class _TopOptions(Options):
    once = Flag.switch("print what is to be seen, once, and exit")
    json = Flag.switch("print one JSON object each second or, with --once, one")
    help = HELP


def top(words: Sequence[str]) -> int:
    """Run `rallypoint top WORDS`; returns the exit status."""
    return perform_on_job(PROGRAM, words, _USAGE, _TopOptions, _watch, _show_ended)


def _watch(job: RunningJob, options: _TopOptions) -> int:
    try:
        if options.json and not options.once:
            return _print_json(job)
        if options.once or not _is_terminal():
            _print(job, view_once(job), is_json=options.json)
            return 0
        with Screen() as screen:
            browser = Browser(job, screen, has_colours=not os.environ.get("NO_COLOR"))
            is_over = browser.browse()
    except KeyboardInterrupt:
        return 0
    if is_over:
        print(printable(f"{job} has ended"))
    if browser.is_busy:  # with what nobody waits for any more
        sys.stdout.flush()
        os._exit(0)
    return 0


def _show_ended(word: str, options: _TopOptions) -> int | None:
    """Print the last job of that name as it ended; None if there is none."""
    found = latest_ended(word)
    if found is None:
        return None
    view = view_of_ended(found[0])
    _print(found[0], view, is_json=options.json)
    for event in () if options.json else view.events[-_MOST_EVENTS:]:
        print(one_line(event_text(event)))
    return 0


def _is_terminal() -> bool:
    return os.isatty(0) and os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb"


def _print(job: RunningJob | EndedJob, view: JobView, *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(view_json(job, view, with_defaults=True)), flush=True)
        return
    columns = get_terminal_size((_WIDE, 0)).columns
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    print(*frame(job.name, view, Choices(), columns, 0, has_colours=False), sep="\n")


def _print_json(job: RunningJob) -> int:
    for history in follow(job.agents):
        view = view_of(history)
        if view is not None:
            _print(job, view, is_json=True)
    return 0
