"""What happens in `rallypoint top` from key to key. Looks at workers, which take a second, and
traces run in threads, so that the screen goes on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from rallypoint.base.errors import HostError
from rallypoint.base.wording import one_line
from rallypoint.cli.jobs import RunningJob
from rallypoint.cli.logs import last_lines
from rallypoint.cli.stacks import stacks_text
from rallypoint.cli.top.frame import HELP, SORTS, Choices, Page, frame, shown_ranks
from rallypoint.cli.top.screen import Screen
from rallypoint.cli.watching import Inspections, inspect
from rallypoint.diagnosis.answer import explanation_of
from rallypoint.diagnosis.job_view import Inspection, JobHistory, JobView, view_of
from rallypoint.launch.inspection.all_nodes import look_everywhere
from rallypoint.launch.inspection.job_follower import follow

R = TypeVar("R")
_VIEW_S = 0.5  # the ranks are looked through at most so often, and keys are answered at once
_SPEEDS = 20  # bars
_TRACE_S = 5
_LOG_LINES, _LOG_LINES_OF_RANK = 200, 20
_NO_LOGS = "it writes no output to files on this machine; --log-dir DIR --redirects 3 does"


class Browser:
    """One user at one screen."""

    def __init__(self, job: RunningJob, screen: Screen, *, has_colours: bool) -> None:
        self._job, self._screen, self._has_colours = job, screen, has_colours
        self._choices = Choices()
        self._view: JobView | None = None
        self._viewed_at = -_VIEW_S
        self._speeds: deque[float] = deque(maxlen=_SPEEDS)
        self._inspections = Inspections()
        self._running: set[str] = set()
        self._done = SimpleQueue[Callable[[], None]]()
        self._actions: dict[str, Callable[[], None]] = {
            "escape": lambda: self._choose(page=None, first=0, note=""),
            "enter": self._show_rank,
            "s": self._sort,
            "n": lambda: self._choose(prompt="node", typed=self._choices.node),
            "/": lambda: self._choose(prompt="text", typed=self._choices.text),
            "p": lambda: self._choose(is_paused=not self._choices.is_paused),
            "e": lambda: self._show("evidence", self._evidence),
            "l": lambda: self._show("log", self._log),
            "t": self._trace,
            "?": lambda: self._choose(page=Page("Keys and columns", tuple(HELP.split("\n")))),
        }

    @property
    def is_busy(self) -> bool:
        """Whether threads are at work."""
        return bool(self._running)

    def browse(self) -> bool:
        """Until the user ends it, or the job is over; whether it is."""
        for history in follow(self._job.agents, self._wait):
            for key in self._screen.pressed():
                if not self._pressed(key):
                    return False
            self._take_results()
            self._look(history)
            self._draw()
        return True

    def _wait(self, descriptors: Sequence[int], timeout_s: float) -> None:
        self._screen.wait(descriptors, min(timeout_s, _VIEW_S))

    def _look(self, history: JobHistory) -> None:
        now = time.monotonic()
        if self._choices.is_paused or now < self._viewed_at + _VIEW_S:
            return
        before, self._view = self._view, view_of(history, self._inspections.latest)
        self._viewed_at = now
        view = self._view
        if view is None:
            return
        if view.speed is not None and (before is None or before.uptime_s != view.uptime_s):
            self._speeds.append(view.speed)
        if self._inspections.is_due(view, now):
            self._start("why", lambda: inspect(self._job.agents), self._inspected)

    def _inspected(self, inspection: Inspection) -> None:
        self._inspections.add(inspection)
        self._viewed_at = -_VIEW_S

    def _draw(self) -> None:
        view = self._view
        if view is not None:
            view = replace(view, age_s=view.age_s + time.monotonic() - self._viewed_at)
        columns, rows = self._screen.size
        choices = replace(self._choices, speeds=tuple(self._speeds))
        self._screen.show(
            frame(self._job.name, view, choices, columns, rows, has_colours=self._has_colours)
        )

    # Keys.

    def _pressed(self, key: str) -> bool:
        """Returns whether to go on."""
        if self._choices.prompt:
            self._typed(key)
        elif key in ("up", "down", "page up", "page down"):
            self._move(-1 if "up" in key else 1, by_page="page" in key)
        elif key in self._actions:
            self._actions[key]()
        return key != "q" or bool(self._choices.prompt)

    def _sort(self) -> None:
        names = list(SORTS)
        self._choose(sort=names[(names.index(self._choices.sort) + 1) % len(names)], first=0)

    def _choose(self, **changes: object) -> None:
        self._choices = replace(self._choices, **changes)  # type: ignore[arg-type]

    def _typed(self, key: str) -> None:
        typed = self._choices.typed
        if key == "escape":
            self._choose(prompt="", typed="")
        elif key == "enter":
            self._choose(**{self._choices.prompt: typed.strip()}, prompt="", typed="", first=0)
        elif key == "backspace":
            self._choose(typed=typed[:-1])
        elif len(key) == 1 and key.isprintable():
            self._choose(typed=typed + key)

    def _move(self, step: int, *, by_page: bool) -> None:
        page_rows = max(1, self._screen.size.lines - 8)
        if self._choices.page is not None:
            last = max(0, len(self._choices.page.lines) - 1)
            first = self._choices.first + step * (page_rows if by_page else 1)
            self._choose(first=min(max(0, first), last))
            return
        ranks = [each.rank for each in shown_ranks(self._view, self._choices)] if self._view else []
        if not ranks:
            return
        at = ranks.index(self._choices.rank) if self._choices.rank in ranks else -1
        at = min(max(0, at + step * (page_rows if by_page else 1)), len(ranks) - 1)
        first = min(max(self._choices.first, at - page_rows + 1), at)
        self._choose(rank=ranks[at], first=first)

    # What takes time.

    def _show_rank(self) -> None:
        rank = self._choices.rank
        if rank is None:
            self._choose(note="choose a rank first, with the arrows")
        else:
            self._show(f"rank {rank}", lambda: self._rank(rank))

    def _show(self, title: str, read: Callable[[], str]) -> None:
        def show(text: str) -> None:
            self._choose(page=Page(title, tuple(text.split("\n"))), first=0, note="")

        self._choose(note=f"looks: {title}")
        self._start(title, read, show)

    def _evidence(self) -> str:
        looks = look_everywhere(self._job.agents)
        found = explanation_of(looks.first, looks.second)
        return "\n".join([found.sentence, "", *found.evidence, *looks.notes])

    def _rank(self, rank: int) -> str:
        looks = look_everywhere(self._job.agents)
        workers = [worker for node in looks.second.nodes for worker in node.workers]
        stacks = [stacks_text(worker) for worker in workers if worker.rank == rank]
        logs = self._log_lines(frozenset((rank,)), _LOG_LINES_OF_RANK)
        return "\n".join([*(stacks or ["  nothing is known of it"]), "", *logs])

    def _log(self) -> str:
        return "\n".join(self._log_lines(None, _LOG_LINES))

    def _log_lines(self, ranks: frozenset[int] | None, count: int) -> list[str]:
        files = last_lines(self._job.agents, ranks, count)
        lines = []
        for path, written in files.items():
            lines += [f"{path}:", *(f"  {line.decode(errors='replace')}" for line in written), ""]
        return lines or [_NO_LOGS]

    def _trace(self) -> None:
        name = re.sub(r"[^\w.-]", "_", self._job.name)
        file = f"trace-{name}-{time.strftime('%H%M%S')}.json.gz"
        words = ("trace", str(self._job.agents[0].pid), "-o", file, "-s", str(_TRACE_S))

        def trace() -> str:
            command = [sys.executable, "-P", "-m", "rallypoint", *words]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return f"the trace is in {os.path.abspath(file)}; open it at ui.perfetto.dev"
            return (done.stderr.strip().split("\n") or [""])[-1]

        self._choose(note=f"traces for {_TRACE_S} s")
        self._start("trace", trace, lambda note: self._choose(note=note))

    def _start(self, name: str, work: Callable[[], R], use: Callable[[R], None]) -> None:
        """Work in a thread, and then use the result in this one; one of a name at a time."""
        if name in self._running:
            return
        self._running.add(name)

        def run() -> None:
            try:
                result = work()
            except (HostError, OSError) as error:
                note = one_line(str(error))
                self._done.put(lambda: self._ended(name, lambda: self._choose(note=note)))
            else:
                self._done.put(lambda: self._ended(name, lambda: use(result)))
            self._screen.wake()

        threading.Thread(target=run, daemon=True).start()

    def _ended(self, name: str, use: Callable[[], None]) -> None:
        self._running.discard(name)
        use()

    def _take_results(self) -> None:
        while True:
            try:
                self._done.get_nowait()()
            except Empty:
                return
