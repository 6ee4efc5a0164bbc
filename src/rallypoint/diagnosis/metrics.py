"""Running jobs as metrics for Prometheus, and their text in its two formats. Pure.

Each node tells of its own ranks; of the job as a whole, the node with node rank 0 does. Values are
those of the nodes' latest updates, with no timestamps: an idle series stays. What an update does
not know has no series. OpenMetrics 1.0.0: https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median

from rallypoint.base.job_so_far import BOUNDS_S, CAUSES, Durations, JobSoFar
from rallypoint.base.wording import one_line
from rallypoint.diagnosis.job_view import JobHistory, JobView, view_of
from rallypoint.diagnosis.node_update import NodeUpdate

PHASES = ("waiting", "running", "paused", "holding", "keeping", "stopping", "ending", "done")
MOST_RANKS = 64  # of a node that have series of their own; of more, the worst ones
_WORST = 3
_PREFIX = "rallypoint_"
_MOST_OF_LABEL = 100  # characters
_OVER_RANKS: dict[str, Callable[[Iterable[float]], float]] = {
    "min": min,
    "median": median,
    "max": max,
}


class MetricKind(Enum):
    """The type of a family, as OpenMetrics names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"
    STATESET = "stateset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of metrics.

    Attributes:
        name: without prefix and suffix.
        unit: the end of the name; empty if there is none.
        is_of_rank: there is one for each rank.
    """

    name: str
    kind: MetricKind
    help: str
    unit: str = ""
    is_of_rank: bool = False

    @property
    def sample_name(self) -> str:
        """The name of its series."""
        suffix = {MetricKind.COUNTER: "_total", MetricKind.INFO: "_info"}.get(self.kind, "")
        return f"{_PREFIX}{self.name}{suffix}"

    def over_ranks(self, which: str) -> Family:
        """The gauge of the minimum, the median or the maximum over a node's ranks."""
        stem = self.name.removesuffix(f"_{self.unit}") if self.unit else self.name
        return replace(
            self,
            name="_".join(filter(None, (stem, which, self.unit))),
            kind=MetricKind.GAUGE,
            help=f"{self.help} The {which} over the node's ranks.",
            is_of_rank=False,
        )


def _of_job(name: str, kind: MetricKind, text: str, unit: str = "") -> Family:
    return Family(name=name, kind=kind, help=text, unit=unit)


def _of_rank(name: str, kind: MetricKind, text: str, unit: str = "") -> Family:
    return Family(name=name, kind=kind, help=text, unit=unit, is_of_rank=True)


_COUNTER, _GAUGE, _S = MetricKind.COUNTER, MetricKind.GAUGE, "seconds"
_HISTOGRAM = MetricKind.HISTOGRAM
_BY_NAME = {
    each.name: each
    for each in (
        _of_job("job", MetricKind.INFO, "A job with ranks on this machine."),
        _of_job("phase", MetricKind.STATESET, "What the launcher is doing."),
        _of_job("up_seconds", _GAUGE, "Time since the launcher started.", _S),
        _of_job("rounds", _COUNTER, "Rounds so far: the number of the current one, plus one."),
        _of_job("restarts", _COUNTER, "How often all workers were started anew."),
        _of_job("losses", _COUNTER, "How often ranks were lost, after which the job continued."),
        _of_job("recovery_seconds", _HISTOGRAM, "In-place recoveries, as node 0 saw them.", _S),
        _of_job("trained_seconds", _COUNTER, "Time in which new steps ended.", _S),
        _of_job("stalled", _GAUGE, "1 if no rank has made a call or a step for three seconds."),
        _of_job("stalled_seconds", _GAUGE, "Time since any rank made a call, if stalled.", _S),
        _of_job("steps", _COUNTER, "The last step of the program."),
        _of_job("step_seconds", _GAUGE, "Mean time of a step in the last ten seconds.", _S),
        _of_job("steps_planned", _GAUGE, "The number of steps that the program announced."),
        _of_job("progress_ratio", _GAUGE, "Share of the planned steps that are done.", "ratio"),
        _of_job("last_step_timestamp_seconds", _GAUGE, "Unix time of the last step.", _S),
        _of_rank("calls", _COUNTER, "Collectives, sends and receives."),
        _of_rank("call_bytes", _COUNTER, "Bytes of their arrays, where known.", "bytes"),
        _of_rank("call_waited_seconds", _COUNTER, "Time in calls that waited for others.", _S),
        _of_rank("last_call_timestamp_seconds", _GAUGE, "Unix time of the last call.", _S),
        _of_rank("call_running_seconds", _GAUGE, "How long its current call has taken.", _S),
        _of_rank("lateness_seconds", _GAUGE, "How late it is in each step, or else call.", _S),
        _of_rank("worker_cpu_seconds", _COUNTER, "CPU time of the worker's process.", _S),
        _of_rank("worker_starved_seconds", _COUNTER, "Time it was ready, but got no core.", _S),
        _of_rank("worker_resident_memory_bytes", _GAUGE, "Its resident memory.", "bytes"),
        _of_job("exporter_silent_nodes", _GAUGE, "Nodes that have told nothing for seconds."),
        _of_job("exporter_scrape_seconds", _GAUGE, "How long the last scrape took.", _S),
    )
}
FAMILIES = tuple(
    family
    for each in _BY_NAME.values()
    for family in (each, *map(each.over_ranks, _OVER_RANKS if each.is_of_rank else ()))
)

Labels = tuple[tuple[str, str], ...]
Value = float | Durations
Metrics = dict[str, dict[Labels, Value]]  # by the name of the family and by labels


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedJob:
    """What is known of a job.

    Attributes:
        pid: the oldest launcher's here.
        here: the nodes on this machine.
        job: all nodes; None: another machine tells of the job as a whole.
        read_at: when that was known, in Unix time.
    """

    run_id: str
    pid: int
    here: JobHistory
    job: JobHistory | None
    read_at: float


def metrics_of(jobs: Iterable[ExportedJob], version: str) -> Metrics:
    """The metrics of jobs.

    Args:
        version: that of Rallypoint.
    """
    metrics: Metrics = {each.name: {} for each in FAMILIES}
    names: set[str] = set()
    for job in jobs:
        name = _label(job.run_id)
        while name in names:  # two jobs may have the same name, but not the same series
            name = f"{name} ({job.pid})"
        names.add(name)
        view = view_of(job.job) if job.job is not None else None
        late: dict[int, float] = {}
        if view is not None:
            _add_job(metrics, name, job, view)
            late = {each.rank: each.late_s for each in view.ranks if each.late_s is not None}
            for node in view.nodes:
                known = {rank: late[rank] for rank in node.ranks if rank in late}
                rows: _Rows = {("lateness_seconds", ""): known}
                _add_ranks(metrics, name, node.node_rank, rows, _worst(node.ranks, late))
        for here in job.here.nodes:
            if here.updates:
                update = here.updates[-1]
                _add_node(metrics, name, update, version)
                rows = _rows(update, job.read_at - here.age_s)
                worst = _worst([each.rank for each in update.ranks], late, _waited(rows))
                _add_ranks(metrics, name, here.node_rank, rows, worst)
    return metrics


def render(metrics: Metrics, *, openmetrics: bool) -> str:
    """The metrics as text: OpenMetrics 1.0.0, or else Prometheus' text format 0.0.4."""
    lines = []
    for family in FAMILIES:
        values = metrics.get(family.name)
        if not values:
            continue
        is_gauge = family.kind not in (MetricKind.COUNTER, MetricKind.HISTOGRAM)
        name = f"{_PREFIX}{family.name}" if openmetrics else family.sample_name
        kind = family.kind.value if openmetrics else "gauge" if is_gauge else family.kind.value
        lines.append(f"# TYPE {name} {kind}")
        if openmetrics and family.unit:
            lines.append(f"# UNIT {name} {family.unit}")
        lines.append(f"# HELP {name} {family.help}")
        for suffix, labels, value in _samples(values):
            shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
            number = value if isinstance(value, int) else round(value, 6)
            name = f"{family.sample_name}{suffix}"
            lines.append(f"{name}{{{shown}}} {number}" if shown else f"{name} {number}")
    return "".join(f"{line}\n" for line in [*lines, *(["# EOF"] if openmetrics else [])])


def _samples(values: Mapping[Labels, Value]) -> Iterator[tuple[str, Labels, float]]:
    """The series of a family: the ends of their names, labels and values."""
    for labels, value in values.items():
        if not isinstance(value, Durations):
            yield "", labels, value
            continue
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), value.cumulative, strict=True):
            yield "_bucket", (*labels, ("le", bound)), count
        yield "_sum", labels, value.sum_s
        yield "_count", labels, value.cumulative[-1]


_Rows = dict[tuple[str, str], dict[int, float]]  # of ranks, by family and group


def _add_job(metrics: Metrics, name: str, job: ExportedJob, view: JobView) -> None:
    run_id = ("run_id", name)

    def put(family: str, value: Value | None, *labels: tuple[str, str]) -> None:
        if value is not None:
            metrics[family][run_id, *labels] = value

    for phase in dict.fromkeys((*PHASES, view.phase)):
        put("phase", int(phase == view.phase), (f"{_PREFIX}phase", _label(phase)))
    put("up_seconds", view.uptime_s)
    put("rounds", view.round + 1)
    put("stalled", int(view.is_stalled))
    quiet = [each.for_s for each in view.ranks if each.for_s is not None and not each.end]
    put("stalled_seconds", min(quiet, default=None) if view.is_stalled else 0)
    put("exporter_silent_nodes", sum(node.silent_s is not None for node in view.nodes))
    updates = [node.updates[-1] for node in (job.job.nodes if job.job else ()) if node.updates]
    so_far = next((each.so_far for each in updates if each.so_far), JobSoFar())
    put("restarts", so_far.restarts)
    for cause in CAUSES:
        put("losses", so_far.losses.get(cause, 0), ("cause", cause))
    for part, durations in so_far.recoveries.items():
        put("recovery_seconds", durations, ("part", _label(part)))
    put("trained_seconds", so_far.trained.trained_s if so_far.trained else None)
    if view.step is None:
        return
    put("steps", view.step, ("source", _label(view.source)))
    put("step_seconds", 1 / view.steps_per_s if view.steps_per_s else None)
    put("steps_planned", view.total)
    put("progress_ratio", min(1.0, view.step / view.total) if view.total else None)
    moments = [
        job.read_at - node.age_s - rank.step_ms_ago / 1000
        for node in (job.job.nodes if job.job else ())
        for update in node.updates[-1:]
        for rank in update.ranks
        if rank.step is not None
    ]
    put("last_step_timestamp_seconds", max(moments, default=None))


def _add_node(metrics: Metrics, name: str, update: NodeUpdate, version: str) -> None:
    told = {
        "run_id": name,
        "node_rank": str(update.node_rank),
        "world_size": str(update.world_size),
        "nodes": str(update.nodes),
        "version": version,
        "backend": _label(",".join(sorted({each.backend for each in update.groups}))),
    }
    metrics["job"][tuple(told.items())] = 1


def _rows(update: NodeUpdate, at: float) -> _Rows:
    """What a node tells of its ranks; `at`: when it did, in Unix time."""
    rows: _Rows = {}

    def put(family: str, rank: int, value: float, group: str = "") -> None:
        of_family = rows.setdefault((family, group), {})
        of_family[rank] = of_family.get(rank, 0) + value  # of groups with the same name

    for rank in update.ranks:
        for each in rank.counts:
            if each.calls >= 0:
                names = update.groups[each.group]
                group = _label(names.name) or "unnamed"
                put("calls", rank.rank, each.calls + each.transfers, group)
                put("call_waited_seconds", rank.rank, each.waited_us / 1e6, group)
                if names.backend == "rallypoint":  # others do not tell
                    put("call_bytes", rank.rank, each.kib << 10, group)
        if rank.group >= 0:
            for_s = rank.for_ms / 1000
            put("last_call_timestamp_seconds", rank.rank, at - for_s)
            put("call_running_seconds", rank.rank, for_s if rank.is_running else 0)
        if rank.state:  # its process is there
            put("worker_cpu_seconds", rank.rank, rank.cpu_ms / 1000)
            put("worker_resident_memory_bytes", rank.rank, rank.rss_kb << 10)
            if rank.starved_ms >= 0:
                put("worker_starved_seconds", rank.rank, rank.starved_ms / 1000)
    return rows


def _waited(rows: _Rows) -> dict[int, float]:
    waited: dict[int, float] = {}
    for (family, _), of_family in rows.items():
        if family == "call_waited_seconds":
            for rank, value in of_family.items():
                waited[rank] = waited.get(rank, 0.0) + value
    return waited


def _worst(
    ranks: Sequence[int], late: Mapping[int, float], waited: Mapping[int, float] | None = None
) -> list[int] | None:
    """Of many ranks those that come latest or, if that is not known, have waited least."""
    if len(ranks) <= MOST_RANKS:
        return None
    waited = waited or {}
    return sorted(ranks, key=lambda rank: (-late.get(rank, 0.0), waited.get(rank, 0.0)))[:_WORST]


def _add_ranks(
    metrics: Metrics, name: str, node_rank: int, rows: _Rows, worst: Sequence[int] | None
) -> None:
    for (family, group), values in rows.items():
        of_group = (("group", group),) if group else ()
        for rank in sorted(values):
            if worst is None or rank in worst:
                labels = (("run_id", name), ("rank", str(rank)), *of_group)
                metrics[family][labels] = values[rank]
        if worst is not None and values:
            labels = (("run_id", name), ("node_rank", str(node_rank)), *of_group)
            for which, reduce in _OVER_RANKS.items():
                metrics[_BY_NAME[family].over_ranks(which).name][labels] = reduce(values.values())


def _label(text: str) -> str:
    """A text of the job as the value of a label: of characters that can be printed, and short."""
    return one_line(text[:_MOST_OF_LABEL])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
