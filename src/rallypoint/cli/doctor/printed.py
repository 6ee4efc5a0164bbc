"""What `rallypoint doctor` prints: a line for each finding, or a JSON object. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rallypoint.base.json_records import to_json
from rallypoint.base.wording import one_line
from rallypoint.doctor.check_result import Finding, Severity
from rallypoint.doctor.checks import TITLES, diagnose
from rallypoint.doctor.cluster_facts import ClusterFacts

_COLOURS = {Severity.GREEN: "32", Severity.YELLOW: "33", Severity.RED: "31"}


def report_of(cluster: ClusterFacts, seconds: float) -> dict[str, Any]:
    """All findings, as JSON."""
    findings = diagnose(cluster)
    worst: dict[int, Severity] = {}
    for each in findings:
        worst[each.check] = max(worst.get(each.check, Severity.GREEN), each.level)
    return {
        "level": max((each.level for each in findings), default=Severity.GREEN).word,
        "nodes": [node.name for node in cluster.nodes],
        "seconds": round(seconds, 1),
        "findings": [_as_json(each, cluster.count) for each in findings],
        "checks": [
            {"number": number, "title": title, "level": worst.get(number, Severity.GREEN).word}
            for number, title in TITLES.items()
        ],
        "facts": to_json(cluster, with_defaults=True),
    }


def as_text(report: Mapping[str, Any], *, is_colourful: bool, is_verbose: bool) -> str:
    """The lines for people."""
    lines = [
        _line(each["level"], each["text"], is_colourful=is_colourful) for each in report["findings"]
    ]
    if is_verbose:
        lines += [
            _line("green", f"{each['number']} {each['title']}", is_colourful=is_colourful)
            for each in report["checks"]
            if each["level"] == "green"
        ]
    return "\n".join([*lines, _summary(report)])


def as_json(report: Mapping[str, Any]) -> str:
    """The report as one JSON object."""
    return json.dumps(report)


def exit_status(report: Mapping[str, Any]) -> int:
    """The exit status: 1 if something is red."""
    return int(report["level"] == Severity.RED.word)


def _as_json(finding: Finding, nodes: int) -> dict[str, Any]:
    return {
        "level": finding.level.word,
        "check": finding.check,
        "title": TITLES[finding.check],
        "where": list(finding.where),
        "what": finding.what,
        "advice": finding.advice,
        "text": finding.text(nodes),
    }


def _line(word: str, text: str, *, is_colourful: bool) -> str:
    shown = f"{word:<6}"
    if is_colourful:
        shown = f"\x1b[{_COLOURS[Severity[word.upper()]]}m{shown}\x1b[0m"
    return f"{shown}  {one_line(text)}"


def _summary(report: Mapping[str, Any]) -> str:
    count = len(report["nodes"])
    nodes = f"{count} node{'s' * (count != 1)}, {len(report['checks'])} checks"
    levels = [each["level"] for each in report["findings"]]
    told = [
        f"{levels.count(level.word)} {level.word}"
        for level in (Severity.RED, Severity.YELLOW)
        if level.word in levels
    ]
    return f"{nodes}, {report['seconds']} s: {', '.join(told) or 'no problems found'}"
