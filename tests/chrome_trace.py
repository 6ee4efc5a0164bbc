"""Reads a file in Chrome's trace format strictly, and knows nothing of what writes it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

NUMBERS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("pid", "tid", "id"), (int,)),
    **dict.fromkeys(("ts", "dur"), (int, float)),
}
NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "B": {"name", "cat", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "t": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


@dataclass
class Slice:
    """A call; times in nanoseconds. Its end is None if it has none."""

    process: str
    track: str
    name: str
    begin: int
    end: int | None
    args: dict[str, Any]


@dataclass
class Trace:
    """What a file says: tracks by the names of process and thread, flows as slices in order."""

    about: dict[str, Any]
    tracks: dict[tuple[str, str], list[Slice]] = field(default_factory=dict)
    flows: list[list[Slice]] = field(default_factory=list)

    @property
    def slices(self) -> list[Slice]:
        return [each for track in self.tracks.values() for each in track]


def read(path: Path) -> Trace:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    whole = json.loads(text)
    assert whole.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    return understand(whole["traceEvents"], whole["otherData"])


def understand(events: Iterable[dict[str, Any]], about: dict[str, Any]) -> Trace:
    events = list(events)
    for event in events:
        assert event.keys() - {"ph"} == NEEDED[event["ph"]], event
        for name, kinds in NUMBERS.items():
            value = event.get(name, 1)
            assert isinstance(value, kinds) and not isinstance(value, bool), event
            assert isinstance(value, int | float) and value >= 0, event
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name")
    }
    processes = {pid: name for (kind, pid, _), name in names.items() if kind == "process_name"}
    assert len(set(processes.values())) == len(processes)
    trace = Trace(about)
    by_thread: dict[tuple[int, int], list[Slice]] = {}
    threads: dict[int, int] = {}
    for event in events:
        if event["ph"] not in "XB":
            continue
        thread = event["pid"], event["tid"]
        assert threads.setdefault(thread[1], thread[0]) == thread[0], "a thread of two processes"
        begin = _ns(event["ts"])
        end = begin + _ns(event["dur"]) if event["ph"] == "X" else None
        process, track = processes[thread[0]], names["thread_name", *thread]
        one = Slice(process, track, event["name"], begin, end, event["args"])
        trace.tracks.setdefault((process, track), []).append(one)
        by_thread.setdefault(thread, []).append(one)
    assert len(by_thread) == len(trace.tracks), "two threads have one name"
    for slices in by_thread.values():
        for before, after in pairwise(slices):
            assert before.end is not None, f"{after} comes after what has not ended"
            assert before.begin < before.end <= after.begin, f"{before} and {after} overlap"
    flows: dict[int, list[tuple[str, Slice]]] = {}
    for event in events:
        if event["ph"] in "stf":
            at = _ns(event["ts"])
            (one,) = [
                each
                for each in by_thread[event["pid"], event["tid"]]
                if each.begin <= at and (each.end is None or at < each.end)
            ]
            flows.setdefault(event["id"], []).append((event["ph"], one))
    for steps in flows.values():
        phases = "".join(phase for phase, _ in steps)
        assert phases == "s" + "t" * (len(steps) - 2) + "f", phases
        flow = [one for _, one in steps]
        assert [one.begin for one in flow] == sorted(one.begin for one in flow)
        trace.flows.append(flow)
    return trace


def _ns(us: float) -> int:
    ns = round(us * 1000)
    assert abs(us * 1000 - ns) < 1e-3, f"{us} us is no whole number of nanoseconds"
    return ns
