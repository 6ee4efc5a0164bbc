"""The checks: from facts to findings. Pure.

One cause is one finding: causes are checked before their consequences, and each check knows which
pairs of nodes are already explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

from rallypoint.base.json_records import to_json
from rallypoint.doctor.check_result import Finding, Pair, Severity, collapse
from rallypoint.doctor.checks import addresses, nodes, pairs
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
    nodes.versions,
    nodes.paths,
    nodes.clocks,
    nodes.devices,
    nodes.surroundings,
    nodes.token,
    nodes.bad_settings,
    nodes.limits,
    nodes.disks,
    nodes.network,
    nodes.congestion_control,
    nodes.other_jobs,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFinding:
    """A finding as programs get it; `text` is the line for people."""

    level: str
    check: int
    title: str
    where: tuple[str, ...]
    what: str
    advice: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCheck:
    """A check, and the worst of its findings."""

    number: int
    title: str
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """All findings, as --json prints them; nodes send it to each other without `facts`."""

    level: str
    nodes: tuple[str, ...]
    seconds: float
    findings: tuple[ReportedFinding, ...]
    checks: tuple[ReportedCheck, ...]
    facts: Mapping[str, object]


def report_of(cluster: ClusterFacts, seconds: float) -> DoctorReport:
    """Examine the facts; collecting them took so many seconds."""
    findings = diagnose(cluster)
    worst: dict[int, Severity] = {}
    for each in findings:
        worst[each.check] = max(worst.get(each.check, Severity.GREEN), each.level)
    facts = to_json(cluster, with_defaults=True)
    assert isinstance(facts, dict)
    return DoctorReport(
        level=max((each.level for each in findings), default=Severity.GREEN).word,
        nodes=tuple(node.name for node in cluster.nodes),
        seconds=round(seconds, 1),
        findings=tuple(_reported(each, cluster.count) for each in findings),
        checks=tuple(
            ReportedCheck(number=number, title=title, level=worst.get(number, Severity.GREEN).word)
            for number, title in TITLES.items()
        ),
        facts=facts,
    )


def _reported(finding: Finding, nodes: int) -> ReportedFinding:
    return ReportedFinding(
        level=finding.level.word,
        check=finding.check,
        title=TITLES[finding.check],
        where=finding.where,
        what=finding.what,
        advice=finding.advice,
        text=finding.text(nodes),
    )
