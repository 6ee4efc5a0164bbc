"""How ranks wait for others of their host: by whether there is a core for each.

Which cores a rank may use is its own affair (taskset, `--numa-binding`): two that are tied to one
core each have enough, two that are tied to the same core have not. Reasons and figures are in
docs/decisions/003-waiting.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

SPINS_WITH_CORES = 50
YIELDS = 1000


def own_cores() -> str:
    """The cores that this thread may use, as the hexadecimal digits of a mask."""
    return f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"


def have_cores(hosts: Sequence[int], cores: Sequence[str]) -> list[bool]:
    """By rank, whether its host has a core for each, from what `own_cores` says on each rank."""
    together: dict[int, int] = {}
    for host, digits in zip(hosts, cores, strict=True):
        together[host] = together.get(host, 0) | int(digits, 16)
    return [together[host].bit_count() >= hosts.count(host) for host in hosts]
