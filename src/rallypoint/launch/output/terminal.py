"""What the launcher itself writes to stderr: messages and, at a terminal, one line of status.

The line is always the last one, and never mixed with output: other writers hide it first, and write
whole lines. There is one stderr, and so one `STATUS`. Nothing here waits for a terminal that is
stopped or a pipe that is full (sink.py).
"""

from __future__ import annotations

import os
import sys

from rallypoint.base.wording import printable
from rallypoint.launch.output.sink import STDERR

_ERASE = "\r\x1b[K"


class StatusLine:
    """One line of status, rewritten in place."""

    def __init__(self) -> None:
        self._is_shown = False
        self._is_wanted = True

    def show(self, text: str) -> None:
        """Write the line, or rewrite it."""
        if not self._is_wanted or STDERR.pending:
            return  # so that a reader who comes back does not find a hundred of them
        try:
            columns = os.get_terminal_size(2).columns or 80  # 0: the terminal does not say
        except OSError:
            columns = 80
        # One column less, because some terminals begin a new line in the last one.
        self._is_shown = _write(f"{_ERASE}{text[: columns - 1]}")

    def give_up(self) -> None:
        """Never show it again: someone else writes to the terminal."""
        self.hide()
        self._is_wanted = False

    def hide(self) -> None:
        """Make room for other output."""
        if self._is_shown:
            self._is_shown = False
            _write(_ERASE)


STATUS = StatusLine()


def is_terminal() -> bool:
    """Whether stderr is a terminal."""
    try:
        return sys.stderr.isatty()
    except (ValueError, AttributeError):  # closed, or None
        return False


def say(text: str) -> None:
    """Print one message of the launcher."""
    print_line(f"rallypoint: {text}")


def print_line(text: str) -> None:
    """Print one line to stderr."""
    STATUS.hide()
    # A carriage return at a terminal: the message replaces a "^C" that may be there.
    start = "\r" if is_terminal() else ""
    _write(f"{start}{printable(text)}\n")


def _write(text: str) -> bool:
    stream = sys.stderr
    try:
        if stream is not sys.__stderr__:  # set by an embedding program
            stream.write(text)
            stream.flush()
        elif stream.fileno() == 2:
            STDERR.write(text.encode(errors="backslashreplace"))
    except (OSError, ValueError, AttributeError):  # closed, or None
        return False  # no reader is left; the exit status still shows the result
    return True
