"""The clock of leases: it also counts the time in which the machine was suspended.

A guardian ends workers by the same clock, so that what a sleeping agent forgot ends on waking.
"""

from __future__ import annotations

import time


def lease_time() -> float:
    """Seconds since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
