"""What is printed, and the exit status."""

from __future__ import annotations

import json
from dataclasses import replace

from rallypoint.base.json_records import to_json
from rallypoint.cli.doctor import as_text, exit_status
from rallypoint.doctor.checks import report_of
from rallypoint.doctor.cluster_facts import (
    Absence,
    ClusterFacts,
    Lookup,
    NodeFacts,
    ProcessLimits,
)


def cluster(*absences: Absence, somaxconn: int = 4096) -> ClusterFacts:
    node = NodeFacts(
        number=0,
        name="n0",
        own_name=Lookup(host="n0"),
        limits=ProcessLimits(somaxconn=somaxconn),
    )
    return ClusterFacts(nodes=(node,), absences=absences)


def test_all_is_well() -> None:
    report = report_of(cluster(), 4.12)
    shown = as_text(report, is_colourful=True, is_verbose=False)
    assert shown == "1 node, 16 checks, 4.1 s: no problems found"
    assert exit_status(report) == 0
    verbose = as_text(report, is_colourful=False, is_verbose=True).splitlines()
    assert (len(verbose), verbose[0]) == (17, "green   1 names")


def test_findings_with_colours_and_without() -> None:
    absence = Absence(name="n1", why="it is \x1b[2Jsilent", advice="wake it")
    report = report_of(cluster(absence, somaxconn=5), 0.0)
    plain = as_text(report, is_colourful=False, is_verbose=False).splitlines()
    assert plain[0] == "red     it is \\x1b[2Jsilent; wake it"
    assert plain[1].startswith("yellow  only 5 connections may wait")
    assert plain[2] == "1 node, 16 checks, 0.0 s: 1 red, 1 yellow"
    colourful = as_text(report, is_colourful=True, is_verbose=False)
    assert colourful.startswith("\x1b[31mred   \x1b[0m  it is")
    assert exit_status(report) == 1
    assert exit_status(report_of(cluster(somaxconn=5), 0.0)) == 0


def test_a_node_that_is_absent_counts() -> None:
    """Of two nodes one is left, of three two: each line says which it is about."""
    for count, names in ((2, "n0: "), (3, "n0, n1: ")):
        one = cluster(somaxconn=5)
        nodes = tuple(replace(one.nodes[0], name=f"n{number}") for number in range(count - 1))
        report = report_of(replace(one, count=count, nodes=nodes), 0.0)
        text = next(each.text for each in report.findings if each.check == 14)
        assert text.startswith(f"{names}only 5 connections may wait")


def test_json() -> None:
    report = json.loads(json.dumps(to_json(report_of(cluster(somaxconn=5), 1.0))))
    assert (report["level"], report["nodes"]) == ("yellow", ["n0"])
    (finding,) = report["findings"]
    assert (finding["check"], finding["title"]) == (14, "the kernel's network")
    assert finding["text"] == f"{finding['what']}; {finding['advice']}"
    assert [each["level"] for each in report["checks"]].count("green") == 15
