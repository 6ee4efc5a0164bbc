"""Numbers on a command line: parsed strictly, and refused in one sentence that names the flag."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.cli.options import UsageError


def whole(values: Mapping[str, str], name: str, default: int) -> int:
    """The value of a flag as a whole number, 0 or more."""
    text = values.get(name, str(default))
    if not is_whole(text):
        raise UsageError(
            f"rallypoint run: {name} is {text!r}; it must be an integer of at least 0."
        )
    return int(text)


def seconds(values: Mapping[str, str], name: str, default: float) -> float:
    """The value of a flag as a time in seconds, 0 or more."""
    text = values.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise UsageError(f"rallypoint run: {name} is {text!r}; it must be a number of seconds.")
    return number


def is_whole(text: str) -> bool:
    """Whether the text is a whole number of plausible size. int() accepts more: "1_0", other
    digits.
    """
    return text.isascii() and text.isdigit() and len(text) < 10
