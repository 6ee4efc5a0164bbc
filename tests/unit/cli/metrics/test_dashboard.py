"""The dashboard for Grafana asks for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from importlib.resources import files

from tests.unit.diagnosis.followed_job import FollowedJob

from rallypoint.base.job_so_far import JobSoFar
from rallypoint.base.trained_time import TrainedTime
from rallypoint.diagnosis.metrics import ExportedJob, metrics_of, render

_WORDS = {"rate", "sum", "max", "by"}


SO_FAR = JobSoFar(trained=TrainedTime(trained_s=50.0))


def exported_labels() -> dict[str, set[str]]:
    """By metric, the labels that it has, of a job with few ranks and one with many."""
    jobs = []
    for ranks in (4, 100):
        history = FollowedJob(ranks=ranks, steps=True, so_far=SO_FAR).history(60.0)
        jobs.append(
            ExportedJob(run_id=f"{ranks}", pid=ranks, here=history, job=history, read_at=0.0)
        )
    found: dict[str, set[str]] = {}
    for line in render(metrics_of(jobs, ""), openmetrics=False).splitlines():
        if not line.startswith("#"):
            name, _, labels = line.partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_each_expression_asks_for_what_is_there() -> None:
    dashboard = json.loads(files("rallypoint.cli.metrics").joinpath("dashboard.json").read_text())
    labels, targets = exported_labels(), 0
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            targets += 1
            expression = target["expr"]
            assert expression.count("(") == expression.count(")")
            plain = re.sub(r'"[^"]*"|\[1m\]', "", expression)
            words = set(re.findall(r"[a-z_]+", plain)) - _WORDS
            (metric,) = words & labels.keys()
            assert words - {metric} <= labels[metric], expression
            assert '{run_id="$run_id"}' in expression
            is_counter = metric.endswith("_total") and metric != "rallypoint_rounds_total"
            assert is_counter == ("rate(" in expression), expression
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels[metric]
    assert targets > 15


def test_it_can_be_imported_anywhere() -> None:
    dashboard = json.loads(files("rallypoint.cli.metrics").joinpath("dashboard.json").read_text())
    source, run_id = dashboard["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert run_id["query"]["query"] == "label_values(rallypoint_job_info, run_id)"
    assert (dashboard["uid"], dashboard["schemaVersion"]) == ("rallypoint-job", 39)
    assert "__inputs" not in dashboard
    uses = [panel["datasource"] for panel in dashboard["panels"]]
    assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in uses)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(uses)
