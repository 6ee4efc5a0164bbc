"""Counters as the stores keep them: decimal text that is read as torch reads it."""

from __future__ import annotations

import re

_DECIMAL = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_MAX_DIGITS = 4000  # int() refuses more


def number_in(value: bytes) -> int | None:
    """Return the number that `value` begins with: blanks, a sign, digits, whatever follows.

    None if there is none, or if it does not fit in 64 bits.
    """
    digits = _DECIMAL.match(value)
    if digits is None or len(digits[1]) > _MAX_DIGITS:
        return None
    number = int(digits[1])
    return number if -(2**63) <= number < 2**63 else None


def wrapped(number: int) -> int:
    """As 64-bit addition: past the end it starts again at the other one."""
    return (number + 2**63) % 2**64 - 2**63
