"""Sizes and times as people write them, and bandwidths as nccl-tests defines them."""

from __future__ import annotations

import math

from rallypoint.base.collective import Collective
from rallypoint.cli.options import UsageError


def size(text: str, flag: str) -> int:
    """``"256M"`` -> 268435456: bytes, or K, M, G as powers of 1024, optionally followed by iB."""
    plain = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = {"K": 10, "M": 20, "G": 30}.get(plain[-1:], 0)
    digits = plain[:-1] if unit else plain
    if not digits.isdecimal():
        raise UsageError(f"{flag} {text} is not a size; write it like 4096, 64K, 256M or 1G.")
    return int(digits) << unit


def doubling(text: str, flag: str) -> list[int]:
    """``"8:64"`` -> 8, 16, 32, 64: from the first to the second, doubling; without a colon, one
    size.
    """
    first, _, last = text.partition(":")
    begin, end = max(size(first, flag), 1), size(last or first, flag)
    if begin > end:
        raise UsageError(f"{flag} {text} is an empty range; give the smaller value first.")
    values = [begin]
    while values[-1] * 2 <= end:
        values.append(values[-1] * 2)
    return values if values[-1] == end else [*values, end]


def bus_factor(collective: Collective, ranks: int) -> float:
    """busbw / algbw (nccl-tests, doc/PERFORMANCE.md)."""
    match collective:
        case Collective.ALL_REDUCE:
            return 2 * (ranks - 1) / ranks
        case Collective.BROADCAST | Collective.REDUCE | Collective.SEND:
            return 1.0
        case _:
            return (ranks - 1) / ranks


def human_bytes(nbytes: float) -> str:
    """8 -> "8 B", 262144 -> "256 KiB"."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.4g} B"


def human_time(time_us: float) -> str:
    """129.4 -> "129.4 us", 44238.6 -> "44.24 ms"."""
    if math.isinf(time_us):
        return "never"
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if time_us >= scale:
            return f"{time_us / scale:.4g} {unit}"
    return f"{time_us:.4g} us"
