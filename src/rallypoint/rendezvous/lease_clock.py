"""The clock of leases, which goes on while the machine is suspended.

The guardian ends workers by the same clock, so leases that ran out meanwhile end them on waking.
"""

from __future__ import annotations

import time


def lease_time() -> float:
    """Seconds since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
