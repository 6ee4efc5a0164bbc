"""Writes how far this program is into its flight record, where the launcher sees it.

Steps come from the program (`progress`), from `elastic.State`, or from PyTorch's optimizers; what
is told explicitly replaces what was guessed. base/recorded_steps.py has the layout and reads it.
Without a launcher nothing is written. No failure here may stop a program.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from operator import index

from rallypoint.base import recorded_steps as layout
from rallypoint.base.errors import InvalidArgumentError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import SupportsFloat, SupportsIndex

OPTIMIZER, ELASTIC, _PROGRAM = 1, 2, 3  # in recorded_steps.SOURCES
_MOST_STEPS = 2**63 - 1


class _Page:
    """The page of this process."""

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        self._words, self._numbers = memory.cast("I"), memory.cast("q")
        self._floats, self._times = memory.cast("d"), memory.cast("f")
        self._names: tuple[str, ...] = ()
        self._seen, self._stride, self._changes = 0, 1, 0
        self.source = self.step = 0
        self._words[layout.VERSION_AT] = layout.VERSION

    def write(
        self,
        source: int,
        step: int,
        total: int | None = None,
        values: dict[str, float] | None = None,
    ) -> None:
        """A step is done; what another source counted is no history of this one's."""
        words, numbers, changes = self._words, self._numbers, self._changes
        now_ns = time.monotonic_ns()
        numbers[layout.CHANGES_AT] = changes + 1
        if source != self.source:
            self.source, self._seen, self._stride = source, 0, 1
            words[layout.SOURCE_AT], words[layout.LOGGED_AT] = source, 0
            self._floats[layout.BEGAN_AT] = now_ns / 1e9
        self.step = numbers[layout.STEP_AT] = step
        numbers[layout.TIME_AT] = now_ns
        if total is not None:
            numbers[layout.TOTAL_AT] = total
        if values:
            self._write_values(values)
        if self._seen % self._stride == 0:
            self._log(step, now_ns)
        self._seen += 1
        numbers[layout.CHANGES_AT] = self._changes = changes + 2

    def _write_values(self, values: dict[str, float]) -> None:
        names = tuple(values)
        if names != self._names:
            for place, name in enumerate(names):
                at = layout.FIRST_NAME + place * layout.NAME_BYTES
                self._bytes[at : at + layout.NAME_BYTES] = name.encode().ljust(
                    layout.NAME_BYTES, b"\0"
                )
            self._names, self._words[layout.VALUES_AT] = names, len(names)
        for place, value in enumerate(values.values(), layout.FIRST_VALUE):
            self._floats[place] = value

    def _log(self, step: int, now_ns: int) -> None:
        words, times, steps = self._words, self._times, self._numbers
        count = words[layout.LOGGED_AT]
        if count == layout.MOST_LOGGED:  # drop every second entry
            count //= 2
            for place in range(count):
                into, out = layout.FIRST_LOGGED_S + place, layout.FIRST_LOGGED_S + 2 * place
                times[into] = times[out]
                into, out = layout.FIRST_LOGGED_STEP + place, layout.FIRST_LOGGED_STEP + 2 * place
                steps[into] = steps[out]
            self._stride *= 2
        times[layout.FIRST_LOGGED_S + count] = now_ns / 1e9 - self._floats[layout.BEGAN_AT]
        steps[layout.FIRST_LOGGED_STEP + count] = step
        words[layout.LOGGED_AT] = count + 1


_page: _Page | None = None
_is_closed = False  # there is no page, and there will be none
_lock = threading.Lock()  # held only to open it


def progress(
    step: SupportsIndex, total: SupportsIndex | None = None, **values: SupportsFloat
) -> None:
    """Tell the launcher how far this program is, once for each step.

    `rallypoint status` and the status line of `rallypoint run` then show the step, how much of the
    total is done, and how much time is left. `rallypoint explain` names a slow rank by its share of
    a step. One rank is enough for the first; let all ranks call it for the second. It communicates
    with nobody and takes about a microsecond, on any thread; without a launcher it does nothing.

    A program with a PyTorch optimizer, or with `elastic.State`, need not call it to have its steps
    counted; only this function tells the total.

        for step in range(start, total):
            loss = train()
            rallypoint.progress(step + 1, total, loss=loss)

    Args:
        step: the steps done so far, from 0. After a restart from a checkpoint, that one's.
        total: how many there will be in all; if it is None, the last one told counts. A step may
            exceed it: a total is often an estimate, and no reason to end a program that trains.
        values: at most 16 numbers to show, such as a loss, converted by `float`: a tensor on a GPU
            is waited for. Their names have at most 32 bytes. They replace the last ones.

    Raises:
        InvalidArgumentError: a step is negative, or a total is not positive; there are too many
            values, a name is too long, or a value is not a number.
        InvalidTypeError: a step or a total is not an integer, or is a bool.
    """
    done, planned = _count(step, "step"), None if total is None else _count(total, "total")
    if planned == 0:
        raise InvalidArgumentError("progress: total must be positive, not 0")
    if len(values) > layout.MOST_VALUES:
        raise InvalidArgumentError(
            f"progress takes at most {layout.MOST_VALUES} values, not {len(values)}"
        )
    _write(_PROGRAM, done, planned, {name: _number(name, each) for name, each in values.items()})


def record_step(source: int, step: int | None = None) -> None:
    """A step is done: that one, or the next one, unless a better source tells them."""
    try:
        _write(source, step)
    except Exception:
        return


def _count(value: SupportsIndex, name: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        count = index(value)
    except TypeError:
        from rallypoint.base.errors import InvalidTypeError

        kind = type(value).__name__
        raise InvalidTypeError(f"progress: {name} must be an integer, not {kind}") from None
    if not 0 <= count <= _MOST_STEPS:
        raise InvalidArgumentError(f"progress: {name} must be from 0 to 2**63 - 1, not {count}")
    return count


def _number(name: str, value: SupportsFloat) -> float:
    if len(name.encode()) > layout.NAME_BYTES:
        raise InvalidArgumentError(
            f"progress: the name {name!r} has more than {layout.NAME_BYTES} bytes"
        )
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InvalidArgumentError(
            f"progress: {name} must be a number, not {value!r:.60}"
        ) from None


def _write(
    source: int, step: int | None, total: int | None = None, values: dict[str, float] | None = None
) -> None:
    page = _page
    if page is None:
        if _is_closed:
            return
        with _lock:
            page = _page or _open()
    if page is not None and source >= page.source:
        if step is None:
            step = page.step + 1 if page.source == source else 1
        page.write(source, step, total, values)  # of two threads at once, one may be lost


def _open() -> _Page | None:
    global _page, _is_closed  # noqa: PLW0603 - a process has one
    template = sys.modules.get("rallypoint.base.template")
    if template is not None and template.is_template:
        return None  # only its workers have steps
    from rallypoint._native import open_steps_page
    from rallypoint.engine.recording import keep_record_of_others

    keep_record_of_others()
    memory = open_steps_page()
    if memory is None:
        _is_closed = True
        return None
    os.register_at_fork(after_in_child=_close)
    _page = _Page(memory)
    return _page


def _close() -> None:
    """The record is the parent's."""
    global _page, _is_closed
    _page, _is_closed = None, True
