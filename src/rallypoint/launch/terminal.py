"""What the launcher itself writes on stderr: messages and, at a terminal, one line of status.

The line is always the last one, and never mixed with output: whoever writes to the terminal hides
it first, and it shows only where a line begins. There is one stderr, and so one `STATUS`.
"""

from __future__ import annotations

import os
import sys

_ERASE = "\r\x1b[K"


class StatusLine:
    """The line.

    Attributes:
        may_show: whether the last output ended its line.
    """

    def __init__(self) -> None:
        self.may_show = True
        self._is_shown = False
        self._is_wanted = True

    def show(self, text: str) -> None:
        """Write the line, or write it anew."""
        if not (self._is_wanted and self.may_show):
            return
        try:
            columns = os.get_terminal_size(2).columns or 80  # 0: the terminal does not say
        except OSError:
            columns = 80
        # One column less: in the last one some terminals would begin a new line.
        self._is_shown = _write(f"{_ERASE}{text[: columns - 1]}")

    def give_up(self) -> None:
        """Never show it again: someone else writes to the terminal."""
        self.hide()
        self._is_wanted = False

    def hide(self) -> None:
        """Make place for other output."""
        if self._is_shown:
            self._is_shown = False
            _write(_ERASE)


STATUS = StatusLine()


def is_terminal() -> bool:
    """Whether someone looks at stderr."""
    try:
        return sys.stderr.isatty()
    except (ValueError, AttributeError):  # closed, or None
        return False


def say(text: str) -> None:
    """One message of the launcher."""
    print_line(f"rallypoint: {text}")


def print_line(text: str) -> None:
    """One line on stderr."""
    STATUS.hide()
    # A carriage return at a terminal: the message replaces the "^C" that may stand there.
    start = "\r" if is_terminal() else ""
    _write(f"{start}{text}\n")


def _write(text: str) -> bool:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, or None
        return False  # nobody listens; the exit status still tells
    return True
