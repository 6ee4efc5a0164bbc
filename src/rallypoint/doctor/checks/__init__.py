"""The checks: from facts to findings. Pure.

One cause is one finding: causes are checked before their consequences, and each check knows which
pairs of nodes are already explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from rallypoint.doctor.check_result import Finding, Pair, collapse
from rallypoint.doctor.checks import addresses, one_machine, pairs, same_everywhere
from rallypoint.doctor.cluster_facts import ClusterFacts

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
    addresses.absent_nodes,
    addresses.names,
    addresses.chosen_addresses,
    addresses.taken_ports,
    pairs.connections,
    addresses.endpoints,
    pairs.large_messages,
    pairs.slow_links,
    addresses.differences,
    same_everywhere.versions,
    same_everywhere.paths,
    same_everywhere.clocks,
    same_everywhere.devices,
    one_machine.surroundings,
    one_machine.token,
    one_machine.bad_settings,
    one_machine.limits,
    one_machine.disks,
    one_machine.network,
    one_machine.congestion_control,
    one_machine.other_jobs,
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
