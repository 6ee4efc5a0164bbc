"""The metrics of jobs, as other programs read them: Prometheus' own parser and its promtool."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as read_text

from rallypoint.base.job_so_far import Durations, JobSoFar
from rallypoint.base.trained_time import TrainedTime
from rallypoint.diagnosis.job_view import JobHistory
from rallypoint.diagnosis.metrics import FAMILIES, ExportedJob, metrics_of, render
from rallypoint.diagnosis.node_update import GroupUpdate
from tests.unit.diagnosis.followed_job import FollowedJob

AT = 1.8e9  # Unix time
Name = tuple[str, frozenset[tuple[str, str]]]  # with labels
Series = dict[Name, float]
HOSTILE = ('a"b', "a\\", "a\nb", "a\r\nb 1", "\x1b]0;x\x07", "\u202etxt", "\udcff", "", "x" * 5000)


def exported(job: FollowedJob, now_s: float = 60.0, run_id: str = "try") -> ExportedJob:
    history = job.history(now_s)
    return ExportedJob(run_id=run_id, pid=7, here=history, job=history, read_at=AT)


def texts(*jobs: ExportedJob) -> tuple[str, str]:
    metrics = metrics_of(jobs, "1.2")
    return render(metrics, openmetrics=True), render(metrics, openmetrics=False)


def series(*jobs: ExportedJob) -> Series:
    """What both formats say, which is the same."""
    openmetrics, text = texts(*jobs)
    found = [dict(samples(read(given))) for read, given in
             ((read_openmetrics, openmetrics), (read_text, text))]  # fmt: skip
    assert found[0] == found[1]
    lines = [each for each in text.splitlines() if not each.startswith("#")]
    assert len(found[0]) == len(lines)  # none twice
    return found[0]


def samples(families: Iterator[object]) -> Iterator[tuple[Name, float]]:
    for family in families:
        for each in family.samples:  # type: ignore[attr-defined]
            assert each.timestamp is None
            yield (each.name, frozenset(each.labels.items())), each.value


def value(found: Series, name: str, **labels: str) -> float:
    return found[f"rallypoint_{name}", frozenset({"run_id": "try", **labels}.items())]


def names(found: Series) -> set[str]:
    return {name.removeprefix("rallypoint_") for name, _ in found}


def test_values_are_those_of_the_job() -> None:
    job = FollowedJob(ranks=4, step_s=0.1, calls=4, late_s={3: 0.03}, steps=True)
    found = series(exported(job))
    assert value(found, "steps_total", source="program") == 600
    assert value(found, "steps_planned") == 50_000
    assert value(found, "progress_ratio") == pytest.approx(600 / 50_000)
    assert value(found, "step_seconds") == pytest.approx(0.1, rel=0.02)
    assert value(found, "last_step_timestamp_seconds") == pytest.approx(AT)
    assert value(found, "up_seconds") == 60
    assert value(found, "rounds_total") == 1
    assert value(found, "stalled") == value(found, "stalled_seconds") == 0
    phases = {phase: value(found, "phase", rallypoint_phase=phase) for phase in ("running", "done")}
    assert phases == {"running": 1, "done": 0}
    for rank in range(4):
        of_rank = {"rank": str(rank)}
        of_group = {**of_rank, "group": "default group"}
        waited_s = 600 * (0.0005 if rank == 3 else 0.0305)
        assert value(found, "calls_total", **of_group) == 2400
        assert value(found, "call_bytes_total", **of_group) == 2400 << 22
        assert value(found, "call_waited_seconds_total", **of_group) == pytest.approx(waited_s)
        assert value(found, "worker_cpu_seconds_total", **of_rank) == pytest.approx(37.2)
        assert value(found, "worker_resident_memory_bytes", **of_rank) == 4_100_000 << 10
        assert value(found, "last_call_timestamp_seconds", **of_rank) == pytest.approx(AT - 0.029)
    assert value(found, "lateness_seconds", rank="3") == pytest.approx(0.03, rel=0.05)
    assert value(found, "job_info", node_rank="0", nodes="1", world_size="4", version="1.2",
                 backend="rallypoint") == 1  # fmt: skip


def test_what_has_happened() -> None:
    so_far = JobSoFar(
        losses={"killed": 3, "elsewhere": 1},
        restarts=1,
        recoveries={"all": Durations().with_one(0.3).with_one(0.05).with_one(100.0)},
        trained=TrainedTime(trained_s=51.5),
    )
    found = series(exported(FollowedJob(ranks=8, nodes=2, steps=True, so_far=so_far)))
    causes = ("killed", "raised", "ended", "hang", "elsewhere")
    assert [value(found, "losses_total", cause=cause) for cause in causes] == [3, 0, 0, 0, 1]
    assert value(found, "restarts_total") == 1
    assert value(found, "trained_seconds_total") == 51.5
    bounds = {dict(labels)["le"]: number for (name, labels), number in found.items()
              if name == "rallypoint_recovery_seconds_bucket"}  # fmt: skip
    assert len(bounds) == 11
    least = {"0.05": 1, "0.25": 1, "0.5": 2, "60.0": 2, "+Inf": 3}
    assert {bound: bounds[bound] for bound in least} == least
    assert value(found, "recovery_seconds_count", part="all") == 3
    assert value(found, "recovery_seconds_sum", part="all") == pytest.approx(100.35)


def test_a_job_that_makes_no_progress() -> None:
    found = series(exported(FollowedJob(stuck=(1, 20.0)), 24.0))
    assert value(found, "stalled") == 1
    assert value(found, "stalled_seconds") == pytest.approx(4)
    assert value(found, "call_running_seconds", rank="0") == pytest.approx(4)
    assert value(found, "call_running_seconds", rank="1") == 0


def test_what_is_not_known_has_no_series() -> None:
    job = FollowedJob(dead=(2,))
    history = job.history(5.0)
    (node,) = history.nodes
    update = node.updates[-1]
    first = update.ranks[0].__replace__(
        counts=(GroupUpdate.of(0, None, 0),), starved_ms=-1, group=-1
    )
    update = update.__replace__(ranks=(first, *update.ranks[1:]))
    here = JobHistory(nodes=(replace(node, updates=(update,)),))
    found = series(ExportedJob(run_id="try", pid=7, here=here, job=None, read_at=AT))
    assert names(found) == {
        "job_info", "calls_total", "call_bytes_total", "call_waited_seconds_total",
        "last_call_timestamp_seconds", "call_running_seconds", "worker_cpu_seconds_total",
        "worker_starved_seconds_total", "worker_resident_memory_bytes",
    }  # fmt: skip
    ranks = {
        name: sorted(dict(labels).get("rank", "") for each, labels in found if each == name)
        for name, _ in found
    }
    assert ranks["rallypoint_calls_total"] == ["1", "2", "3"]
    assert ranks["rallypoint_last_call_timestamp_seconds"] == ["1", "2", "3"]
    assert ranks["rallypoint_worker_cpu_seconds_total"] == ["0", "1", "3"]
    assert ranks["rallypoint_worker_starved_seconds_total"] == ["1", "3"]
    assert not series(ExportedJob(run_id="try", pid=7, here=JobHistory(nodes=()), job=None,
                                  read_at=AT))  # fmt: skip


def test_only_the_job_as_a_whole_has_the_other_nodes() -> None:
    job = FollowedJob(ranks=8, nodes=4, late_s={6: 0.03}, silent={2: 50.0})
    whole = job.history(60.0)
    here = JobHistory(nodes=whole.nodes[:1])
    found = series(ExportedJob(run_id="try", pid=7, here=here, job=whole, read_at=AT))
    assert value(found, "exporter_silent_nodes") == 1
    of_ranks = {name: {dict(labels)["rank"] for each, labels in found if each == name}
                for name, labels in found if "rank" in dict(labels)}  # fmt: skip
    assert of_ranks.pop("rallypoint_lateness_seconds") == {"0", "1", "2", "3", "6", "7"}
    assert all(ranks == {"0", "1"} for ranks in of_ranks.values())


def test_of_many_ranks_of_a_node_the_worst_have_series() -> None:
    late_s = {rank: 0.03 + rank / 10_000 for rank in (7, 70, 99)}
    found = series(exported(FollowedJob(ranks=100, late_s=late_s, steps=True)))
    for name in ("calls_total", "lateness_seconds", "worker_cpu_seconds_total"):
        ranks = {dict(labels)["rank"] for each, labels in found if each == f"rallypoint_{name}"}
        assert ranks == {"7", "70", "99"}, name
    waited = [600 * (0.0399 + 0.0005 - late_s.get(rank, 0.0)) for rank in range(100)]
    for which, over in (("min", min), ("median", median), ("max", max)):
        name = f"call_waited_{which}_seconds"
        labels = {"node_rank": "0", "group": "default group"}
        assert value(found, name, **labels) == pytest.approx(over(waited), rel=1e-4)
    assert not {name for name in names(series(exported(FollowedJob(ranks=64)))) if "_max" in name}


def test_hostile_names_cannot_add_series(seed: int) -> None:
    """Neither by a quote or a line's end, nor by two jobs with the same name."""
    chance = random.Random(seed)
    count = len(series(exported(FollowedJob(ranks=2, steps=True))))
    for _ in range(20):
        run_ids = ["".join(chance.choices(HOSTILE, k=chance.randrange(1, 4))) for _ in range(2)]
        group = chance.choice(HOSTILE)
        job = FollowedJob(ranks=2, steps=True, group=group, values={"loss": "secret"})
        history = job.history(60.0, count=2)
        jobs = [
            ExportedJob(run_id=run_id, pid=pid, here=history, job=history, read_at=AT)
            for pid, run_id in enumerate(run_ids)
        ]
        found = series(*jobs)
        assert len(found) == 2 * count
        assert len({dict(labels)["run_id"] for _, labels in found}) == 2
        for text in texts(*jobs):
            assert "secret" not in text
            assert "train.py" not in text
            assert text.replace("\n", "").isprintable()
            text.encode()


def test_openmetrics_says_units_and_ends() -> None:
    openmetrics, text = texts(exported(FollowedJob(steps=True)))
    assert openmetrics.endswith("\n# EOF\n")
    assert "# EOF" not in text
    assert "# UNIT rallypoint_call_waited_seconds seconds\n" in openmetrics
    assert "UNIT" not in text
    assert "# TYPE rallypoint_job info\n" in openmetrics
    assert "# TYPE rallypoint_job_info gauge\n" in text
    for family in FAMILIES:
        assert not family.unit or family.name.endswith(f"_{family.unit}")


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool: apt-get install prometheus"
)
def test_promtool_finds_no_fault() -> None:
    jobs = [exported(FollowedJob(ranks=2, steps=True), run_id=each) for each in HOSTILE]
    recoveries = {"form": Durations().with_one(0.2)}
    so_far = JobSoFar(recoveries=recoveries, trained=TrainedTime(trained_s=1.0))
    jobs.append(exported(FollowedJob(ranks=65, steps=True, so_far=so_far)))
    _, text = texts(*jobs)
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
