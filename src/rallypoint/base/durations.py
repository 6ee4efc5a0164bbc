"""How long something took, in words."""

from __future__ import annotations

_LEAST_S = 0.9995  # less rounds to fewer than 1000 ms


def brief(duration_s: float) -> str:
    """``3.2 s``, or ``340 ms`` below a second."""
    return f"{duration_s:.1f} s" if duration_s >= _LEAST_S else f"{duration_s * 1000:.0f} ms"
