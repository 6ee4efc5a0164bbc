"""What the page of a job shows: the page itself, page.html, and the data in it. Pure.

Text of the job may hold anything: the data is made printable here, and the page shows it as text
only. It holds what `rallypoint top --json` prints, hence no token, environment or command line.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path

import rallypoint
from rallypoint.base.job_so_far import JobEvent
from rallypoint.base.wording import name_ranks, one_line
from rallypoint.cli.jobs import RunningJob
from rallypoint.cli.top.frame import Choices, shown_ranks
from rallypoint.cli.watching import view_json
from rallypoint.diagnosis.job_view import JobView
from rallypoint.launch.inspection.ended_job import EndedJob

DOCUMENT = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_SPEEDS, _EVENTS = 300, 200  # one speed a second
_MOST_PAST = 512
_MOST_HOSTS = 3  # in an event
_PLACE_OF_DATA = "<!-- data -->"  # in the document, where a saved one has its own


class PageData:
    """The latest view of a job, and what happened since the page began.

    Args:
        began_s: when, in seconds since 1970, as all times here.
    """

    def __init__(self, job: RunningJob | EndedJob, began_s: float) -> None:
        self._job, self._began_s, self._at_s = job, began_s, began_s
        self._view: JobView | None = None
        self._speeds: deque[float] = deque(maxlen=_SPEEDS)
        self._events: deque[dict[str, object]] = deque(maxlen=_EVENTS)
        self._past: dict[JobEvent, None] = {}  # what the job's launcher has told
        self._job_began_s = inf
        self._has_ended = False

    def add(self, view: JobView, at_s: float) -> None:
        """Take the next view."""
        before, self._view, self._at_s = self._view, view, at_s
        if view.speed is not None and (before is None or before.uptime_s != view.uptime_s):
            self._speeds.append(float(f"{view.speed:.4g}"))
        # What is told comes a second late, or later on a busy machine.
        began_s = at_s - view.age_s - view.uptime_s
        self._job_began_s = min(self._job_began_s, began_s, *(each.at for each in view.events))
        self._past |= dict.fromkeys(view.events)
        for old in [*self._past][:-_MOST_PAST]:
            del self._past[old]
        if view.status is None:
            for text in changes(before, view):
                self._events.append({"at": round(at_s, 3), "text": text})

    def add_samples(self, samples: Sequence[tuple[float, int]]) -> None:
        """Take the speeds of a job that has ended, from some of its steps."""
        rates = [
            (now_s, max(0, step - before) / (now_s - then_s))
            for (then_s, before), (now_s, step) in pairwise(samples)
            if now_s > then_s
        ]
        if rates:
            first_s, past_s, count = samples[0][0], rates[-1][0] - samples[0][0], len(rates)
            for number in range(min(count, _SPEEDS)):
                at_s = first_s + (number + 0.5) * past_s / min(count, _SPEEDS)
                at = bisect_left(rates, (at_s,))
                self._speeds.append(float(f"{rates[min(at, count - 1)][1]:.4g}"))

    def end(self, at_s: float) -> None:
        """The job is over."""
        self._has_ended = True
        if not any(each.kind == "end" for each in self._past):
            self._events.append({"at": round(at_s, 3), "text": "the job has ended"})

    def to_json(self) -> dict[str, object]:
        """For `json.dumps`."""
        told: dict[str, object] = {"run_id": self._job.run_id, "name": self._job.name}
        if self._view is not None:
            told = view_json(self._job, self._view, with_defaults=False)
            told["order"] = [rank.rank for rank in shown_ranks(self._view, Choices())]
        told |= {
            "version": rallypoint.__version__,
            "began": round(self._began_s, 3),
            "at": round(self._at_s, 3),
            "has_ended": self._has_ended,
            "speeds": list(self._speeds),
            "events": self._all_events(),
            "job_began": round(self._job_began_s, 3) if self._view else None,
        }
        printed = _printable(told)
        assert isinstance(printed, dict)
        return printed

    def _all_events(self) -> list[dict[str, object]]:
        past = [
            {
                "at": round(each.at, 3),
                "kind": each.kind,
                "text": each.text,
                "lost_s": round(each.lost_s, 3),
            }
            for each in self._past
        ]
        return sorted([*past, *self._events], key=lambda each: float(str(each["at"])))


def changes(before: JobView | None, now: JobView) -> Iterator[str]:
    """What has happened between two views, a sentence each; `before`: None: this is the first."""
    is_new = before is None or before.round != now.round
    if is_new and now.round >= 0 and not now.events:
        nodes = "1 node" if now.node_count == 1 else f"{now.node_count} nodes"
        seen = "begins" if before is not None else "runs"
        yield f"round {now.round} {seen}: {now.world_size} ranks on {nodes}"
    known = {} if before is None or is_new else {rank.rank: rank.end for rank in before.ranks}
    ended: dict[str, list[int]] = {}
    for rank in now.ranks:
        if rank.end and rank.end != known.get(rank.rank):
            ended.setdefault(rank.end, []).append(rank.rank)
    yield from (f"{name_ranks(ranks)}: {end}" for end, ranks in ended.items())
    if before is None:
        return

    def begun_and_over(old: Sequence[object], new: Sequence[object]) -> tuple[str, str]:
        return _listed([e for e in new if e not in old]), _listed([e for e in old if e not in new])

    silent = [
        [f"node {each.host}" for each in view.nodes if each.silent_s is not None]
        for view in (before, now)
    ]
    lost, back = begun_and_over(*silent)
    slow = [[f"rank {each.rank}" for each in view.ranks if each.is_slow] for view in (before, now)]
    late, in_time = begun_and_over(*slow)
    if lost:
        yield f"silent: {lost}"
    if back:
        yield f"no longer silent: {back}"
    if late:
        yield f"slow: {late}, for which others wait again and again"
    if in_time:
        yield f"no longer slow: {in_time}"
    if now.is_stalled and not before.is_stalled:
        yield "no rank makes progress"
    if before.is_stalled and not now.is_stalled:
        yield "the job makes progress again"
    faults = [any(each.is_at_fault for each in view.ranks) for view in (before, now)]
    if faults == [False, True]:
        yield now.headline


def _listed(names: Sequence[object]) -> str:
    more = len(names) - _MOST_HOSTS
    text = ", ".join(map(str, names[:_MOST_HOSTS]))
    return f"{text} and {more} more" if more > 0 else text


def _printable(told: object) -> object:
    """All texts, with control characters and those that reorder a line spelled out."""
    if isinstance(told, dict):
        return {one_line(name): _printable(each) for name, each in told.items()}
    if isinstance(told, list):
        return [_printable(each) for each in told]
    return one_line(told) if isinstance(told, str) else told


def policy(*, is_saved: bool = False) -> str:
    """The Content-Security-Policy: the document's own script and style, by their hashes."""
    script, style = (
        base64.b64encode(hashlib.sha256(_block(tag).encode()).digest()).decode()
        for tag in ('<script type="module">', "<style>")
    )
    rules = f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'"
    rules += "; img-src data:; base-uri 'none'; form-action 'none'"
    # A file makes no requests; and frame-ancestors has an effect only in a header.
    return rules if is_saved else f"{rules}; connect-src 'self'; frame-ancestors 'none'"


def _block(tag: str) -> str:
    end = f"</{tag[1:].split('>')[0].split()[0]}>"
    found = re.search(f"{re.escape(tag)}(.*?){end}", DOCUMENT, re.DOTALL)
    assert found is not None
    return found[1]


def saved_document(data: dict[str, object]) -> str:
    """The page with its data, as a file that needs nothing else."""
    text = json.dumps(data).replace("<", "\\u003c")  # so that no </script> ends the block
    policy_tag = f'<meta http-equiv="Content-Security-Policy" content="{policy(is_saved=True)}">'
    block = f'<script type="application/json" id="saved">{text}</script>'
    return DOCUMENT.replace(_PLACE_OF_DATA, f"{policy_tag}\n{block}", 1)
