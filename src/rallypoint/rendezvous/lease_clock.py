"""The clock of leases, which continues while the machine is suspended.

The guardian uses the same clock, so leases that expired meanwhile end workers on waking.
"""

from __future__ import annotations

import time


def lease_time() -> float:
    """Seconds since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
