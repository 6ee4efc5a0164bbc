"""Reads faulthandler's text on a process's threads, of CPython 3.11 to 3.14. Pure.

faulthandler lists the newest thread first, at most 100 of them, and each thread's innermost frame
first. Other lines are skipped.
"""

from __future__ import annotations

import re

from rallypoint.diagnosis.facts import Frame, Stack

_THREAD = re.compile(
    r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d+|\?\?\?) in (.*)')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_GARBAGE = "  Garbage-collecting"
_MORE_THREADS = "..."  # at the beginning of a line; the mark for more frames is indented


def parse_stacks(text: str) -> tuple[Stack, ...]:
    """The threads in `text`, in its order. The oldest is the main one, if all are there."""
    threads: list[tuple[str, str, list[Frame]]] = []
    collecting = set()
    has_all = True
    for line in text.split("\n"):
        thread, frame = _THREAD.fullmatch(line), _FRAME.fullmatch(line)
        if thread is not None:
            threads.append((f"0x{thread[1]}", _unescaped(thread[2] or ""), []))
        elif line == _MORE_THREADS:
            has_all = False
        elif not threads:
            continue
        elif line == _GARBAGE:
            collecting.add(len(threads) - 1)
        elif frame is not None:
            number = int(frame[2]) if frame[2].isdigit() else 0
            threads[-1][2].append(
                Frame(file=_unescaped(frame[1] or ""), line=number, function=_unescaped(frame[3]))
            )
    return tuple(
        Stack(
            thread=identifier,
            name=name,
            frames=tuple(frames),
            is_main=has_all and index == len(threads) - 1,
            collects_garbage=index in collecting,
        )
        for index, (identifier, name, frames) in enumerate(threads)
    )


def _unescaped(text: str) -> str:
    """Characters outside ASCII were written as their numbers."""
    return _ESCAPE.sub(lambda found: _character(int(found[1] or found[2] or found[3], 16)), text)


def _character(number: int) -> str:
    return chr(number) if number < 0x110000 else "\N{REPLACEMENT CHARACTER}"
