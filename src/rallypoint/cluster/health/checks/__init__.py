"""The checks: from facts to findings. Pure.

One cause is one finding: causes are checked before their consequences, and each check knows which
pairs of nodes are already explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from rallypoint.cluster.health.checks import (
    agreement,
    interfaces,
    machine,
    meeting,
    names,
    pairs,
    settings,
)
from rallypoint.cluster.health.facts import ClusterFacts
from rallypoint.cluster.health.finding import Finding, Pair, collapse

Check = Callable[[ClusterFacts, Set[Pair]], Iterator[Finding]]

# The title of each check, by its number.
TITLES = {
    1: "names",
    2: "the endpoint and its port",
    3: "connections between all nodes, in both directions",
    4: "network interfaces",
    5: "large messages",
    6: "slow links",
    7: "versions",
    8: "devices and CPUs",
    9: "surroundings",
    10: "token",
    11: "clocks",
    12: "limits and disk space",
    13: "paths",
    14: "the kernel's network",
    15: "other jobs",
    16: "settings known to be wrong",
}
# Causes come first; checks whose findings cannot follow from others are at the end.
_ORDER: tuple[Check, ...] = (
    meeting.absent_nodes,
    names.names,
    interfaces.chosen_addresses,
    meeting.taken_ports,
    pairs.connections,
    meeting.endpoints,
    pairs.large_messages,
    pairs.slow_links,
    interfaces.differences,
    agreement.versions,
    agreement.paths,
    agreement.clocks,
    agreement.devices,
    settings.surroundings,
    settings.token,
    settings.bad_settings,
    machine.limits,
    machine.disks,
    machine.network,
    machine.congestion_control,
    machine.other_jobs,
)


def diagnose(cluster: ClusterFacts) -> list[Finding]:
    """All findings, the most severe first."""
    found: list[Finding] = []
    explained: set[Pair] = set()
    for check in _ORDER:
        for finding in check(cluster, explained):
            found.append(finding)
            explained |= finding.explains
    return collapse(found)
