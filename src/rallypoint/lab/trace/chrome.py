"""A trace in Chrome's trace format (JSON), which ui.perfetto.dev and chrome://tracing read.

A rank is a process, a track a thread. Calls are complete events ("X"), calls that have not ended
have only a beginning ("B"). Flows ("s", "t", "f") connect the ranks of a collective. Times are in
microseconds. The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from rallypoint.lab.trace.clocks import Offset
from rallypoint.lab.trace.slices import Drawing, Lane, Slice

_FIRST_THREAD = 1_000_000  # above all process numbers, as thread numbers must be unique


def to_lines(drawing: Drawing, about: Mapping[str, object]) -> Iterator[str]:
    """The file, line by line.

    Args:
        about: facts about the trace as a whole.
    """
    facts = {**about, "clocks": [_clock(node, one) for node, one in drawing.clocks.items()]}
    yield f'{{"displayTimeUnit": "ns",\n"otherData": {json.dumps(facts)},\n"traceEvents": [\n'
    before = ""
    for event in to_events(drawing):
        yield before + json.dumps(event, separators=(",", ":"))
        before = ",\n"
    yield "\n]}\n"


def to_events(drawing: Drawing) -> Iterator[dict[str, object]]:
    """The events: first the names, then the calls of each track in the order of time."""
    for lane in drawing.lanes:
        yield from _names(lane)
    threads: dict[int, tuple[int, int]] = {}  # process and thread, by the identity of slices
    for number, track in enumerate(drawing.tracks):
        process, thread = _process(track.rank), _FIRST_THREAD + number
        yield _meta("thread_name", process, thread, name=track.name)
        yield _meta("thread_sort_index", process, thread, sort_index=number)
        for each in track.slices:
            threads[id(each)] = (process, thread)
            yield _event(each, process, thread)
    for flow, slices in enumerate(drawing.flows, 1):
        for number, each in enumerate(slices):
            process, thread = threads[id(each)]
            phase = "s" if number == 0 else "f" if number == len(slices) - 1 else "t"
            yield {
                "ph": phase,
                "id": flow,
                "cat": "collective",
                "name": each.name,
                "pid": process,
                "tid": thread,
                "ts": _us(each.begin_ns),
                **({"bp": "e"} if phase == "f" else {}),
            }


def _names(lane: Lane) -> Iterator[dict[str, object]]:
    process = _process(lane.rank)
    number = f", {lane.pid}" if lane.pid else ""
    yield _meta("process_name", process, process, name=f"rank {lane.rank} ({lane.host}{number})")
    yield _meta("process_sort_index", process, process, sort_index=lane.rank)
    if lane.clock.how != "same clock":
        yield _meta("process_labels", process, process, labels=_in_words(lane.clock))


def _event(each: Slice, process: int, thread: int) -> dict[str, object]:
    event: dict[str, object] = {
        "ph": "X" if each.end_ns is not None else "B",
        "name": each.name if each.end_ns is not None else f"{each.name} (not done)",
        "cat": "collective" if each.joins is not None else "transfer",
        "pid": process,
        "tid": thread,
        "ts": _us(each.begin_ns),
        "args": each.args,
    }
    if each.end_ns is not None:
        event["dur"] = _us(each.end_ns - each.begin_ns)
    return event


def _meta(what: str, process: int, thread: int, **args: str | int) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _process(rank: int) -> int:
    return rank + 1  # 0 means none


def _us(ns: int) -> float:
    return ns / 1000


def _clock(node_rank: int, clock: Offset) -> dict[str, object]:
    return {
        "node": node_rank,
        "offset_ns": clock.ns,
        "by": clock.how,
        "collectives": clock.collectives,
        "spread_ns": clock.spread_ns,
        "bounds_ns": clock.bounds_ns,
        "in words": _in_words(clock),
    }


def _in_words(clock: Offset) -> str:
    match clock.how:
        case "same clock":
            return "the same clock"
        case "collectives":
            words = f"clock by {clock.collectives} collectives, +-{clock.spread_ns / 1000:.1f} us"
            if clock.bounds_ns is not None:
                width_ns = clock.bounds_ns[1] - clock.bounds_ns[0]
                words += f", certain within {width_ns / 1000:.1f} us"
            return words
        case "time of day":
            return "clock by the time of day: no collective was seen on both nodes"
        case _:
            return "clock not aligned: no reference was found"
