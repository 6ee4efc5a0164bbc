"""How ranks wait for others: this depends on whether their machine has a core for each.

Pods and containers are separate hosts, but those of one machine share its cores. Each rank may use
its own set of cores (taskset, `--numa-binding`): two ranks bound to one core each have enough
cores, two bound to the same core do not. Reasons and figures are in
docs/decisions/003-waiting.md.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

SPINS_WITH_CORES = 50
YIELDS = 1000


def own_cores() -> str:
    """The cores that this thread may use, as the hexadecimal digits of a mask."""
    return f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"


def have_cores(machines: Sequence[str], cores: Sequence[str]) -> list[bool]:
    """By rank, whether its machine has a core for each, from what `own_cores` says on each rank."""
    together: dict[str, int] = {}
    for machine, digits in zip(machines, cores, strict=True):
        together[machine] = together.get(machine, 0) | int(digits, 16)
    ranks = Counter(machines)
    return [together[machine].bit_count() >= ranks[machine] for machine in machines]
