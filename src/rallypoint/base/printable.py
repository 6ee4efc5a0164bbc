"""Text from elsewhere, as it may be shown on a terminal.

A job's name, a host's, a path or an exception's message may contain sequences that a terminal
obeys, characters that reorder a line, or bytes that cannot be printed at all.
"""

from __future__ import annotations


def printable(text: str, kept: str = "\n\t") -> str:
    """The text with its control characters spelled out, except for `kept`."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


def one_line(text: str) -> str:
    """The text as a single line."""
    return printable(text, kept="")
