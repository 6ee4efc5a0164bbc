"""docs/performance.md, its charts, and README.md's figures, from the records in docs/measurements/.

One command wrote a record, or it was transcribed from a dated page beside it. Every figure is read
from one; none is written by hand.
"""

from __future__ import annotations

import json
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import charts
import diagrams
from charts import bytes_of, duration

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "measurements"
Row: TypeAlias = dict[str, Any]  # of JSON

OPERATIONS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather",
    "scatter", "send", "barrier",
)  # fmt: skip
SIZES = (8, 16 << 10, 256 << 10, 4 << 20, 64 << 20)
PEERS = {
    "rallypoint": "Rallypoint",
    "gloo": "gloo, fastest",
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "intelmpi": "Intel MPI",
}
LOSS = {
    "rallypoint": "Rallypoint",
    "ulfm": "Open MPI, ULFM",
    "torchft, 1 s": "torchft, gloo, 1 s",
    "torchrun": "torchrun",
}
OF_GLOO = ("all_reduce_2_default", "all_reduce_2_priority")
# What the page shows, and the records that have it.
FIGURES = {
    "Start": ("preload",),
    "Empty script, launcher's memory": ("launch",),
    "Loss": ("in_place_peers",),
    "Loss, 1 GiB in each rank": ("in_place_peers_1GiB",),
    "DDP": ("ddp_2",),
    "Shared GPU": ("shared_gpu_2",),
    "all_reduce, 2 ranks": ("all_reduce_2",),
    "all_reduce, 4 ranks": ("all_reduce_4",),
    "gloo, default placement": ("all_reduce_2_default",),
    "gloo, real-time priority": ("all_reduce_2_priority",),
    "Other operations": tuple(f"{each}_2" for each in OPERATIONS[1:]),
}

_PAGE = """\
# Performance

<!-- Written by `make pages` from the records in docs/measurements/; do not edit. -->

Each figure is from one machine, and they differ: [Sources](#sources). Measure
[your own machine](guides/benchmarks.md) before you rely on one.

- **Start**: {workers} workers with PyTorch on two cores finish their first all_reduce after
  {preload} with `--preload torch`, {run} without it, and {torchrun} under torchrun.
- **all_reduce**, 2 ranks: {ahead} times as fast as the fastest of three MPIs, the median of
  {sizes} sizes.
- **DDP**, {model} parameters, 2 CPU workers: a step takes {step}; with gloo {gloo_step}.
- **Loss**: when one of 4 ranks is killed, the others continue after {loss}. torchrun starts four
  new processes, which takes {torchrun_loss}.
- **Others are faster** where the table has a `*`. After a loss, Open MPI's ULFM continues after
  {ulfm}; with 1 GiB in each rank it takes {ulfm_large}, Rallypoint {loss_large}.

![Start, recovery, a step of DDP, all_reduce on a shared GPU](measurements/beside_others.svg)

## all_reduce

![Time of all_reduce over its size, for two and four ranks](measurements/all_reduce.svg)

gloo's line is the fastest of three runs, one of them with real-time priority.

## All operations

Microseconds: Rallypoint / the fastest peer, 2 ranks, each bound to a core. Sizes are of the
larger buffer.

{operations}
## Method

- All contenders run in the same job or take turns in one run; the figures are medians.
- Every result of `rallypoint bench` is checked against NumPy.
- The ranks share two cores of a virtual machine, except on the shared GPU. Caches and clocks of
  such machines change within seconds, for all contenders alike: compare within a row.
- A loss is timed from `kill -9`, by the killer's clock, to the last survivor's first correct
  all_reduce.
- A start is timed from the command to the first all_reduce. "Empty script" is from start to end.
- Nothing else ran; a load average in a record is that of the benchmark and of the one before it.
- MPIs are called through mpi4py with the same arrays.

## Sources

DIR stands for an environment with that peer. [Measurements](measurements.md) describes the
files and lists older results.

{sources}
## Limits

- Nothing has been measured on several GPUs, on a real network or on more than 16 cores.
- Ranks that share cores are the usual case here, and not the usual case of training.
"""
_README = """\
| | torchrun | Rallypoint |
|-|-|-|
| {workers} workers with PyTorch on 2 cores, to the first all_reduce ([source]({preload_file})) \
| {torchrun} | {run}; {preload} with `--preload torch` |
| memory of the launcher ([source]({launch_file})) | {torchrun_mib} MiB | {our_mib} MiB |
| one of 4 workers is killed ([source]({loss_file})) | 4 new processes after {torchrun_loss} \
| 3 continue after {loss}, with [`rallypoint.elastic`](docs/guides/in-place-recovery.md) |
| a job hangs | prints nothing | reports rank, call and line |
| DDP step, 2 CPU workers, {model} parameters ([source]({ddp_file})) \
| {gloo_step} (gloo) | {step} |
"""
_README_ZH = """\
| | torchrun | Rallypoint |
|-|-|-|
| {workers} 个 PyTorch 工作进程共用 2 个核，从启动到第一次 all_reduce（[来源]({preload_file})） \
| {torchrun} | {run}；加 `--preload torch` 为 {preload} |
| 启动器占用的内存（[来源]({launch_file})） | {torchrun_mib} MiB | {our_mib} MiB |
| 4 个工作进程中的一个被强制终止（[来源]({loss_file})） | {torchrun_loss} 后启动 4 个新进程 \
| {loss} 后其余 3 个继续运行，需使用 [`rallypoint.elastic`](docs/guides/in-place-recovery.md) |
| 作业卡住 | 没有输出 | 报告 rank、调用和代码行 |
| DDP 单步，2 个 CPU 工作进程，{model} 参数（[来源]({ddp_file})） \
| {gloo_step}（gloo） | {step} |
"""  # noqa: RUF001 - Chinese punctuation
_MARKED = re.compile(
    r"(<!-- figures, written by `make pages` -->\n\n).*?(<!-- end of figures -->)", re.DOTALL
)


@cache
def record(name: str) -> Row:
    """The record of that name."""
    found: Row = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def row_of(name: str, **has: object) -> Row:
    """The only row of a record that has these values."""
    (found,) = (row for row in record(name)["rows"] if has.items() <= row.items())
    return dict(found)


def times(name: str) -> dict[int, dict[str, float]]:
    """Of a record of `rallypoint bench`: bytes -> contender -> microseconds."""
    return {
        row["bytes"]: {
            each: result["time_us"]
            for each, result in row["results"].items()
            if result["time_us"] is not None
        }
        for row in record(name)["rows"]
    }


def all_reduce(ranks: int) -> dict[int, dict[str, float]]:
    """The times of all_reduce, with gloo's fastest at each size."""
    found = times(f"all_reduce_{ranks}")
    others = [times(name) for name in OF_GLOO] if ranks == 2 else []
    for nbytes, row in found.items():
        seen = [each[nbytes]["gloo"] for each in others if "gloo" in each.get(nbytes, {})]
        if "gloo" in row:
            row["gloo"] = min(row["gloo"], *seen)
    return found


def fastest_peer(row: dict[str, float]) -> float:
    """Microseconds of the fastest contender except Rallypoint."""
    return min(us for name, us in row.items() if name != "rallypoint")


def figures() -> dict[str, str]:
    """What both pages say in words."""
    workers = 8
    starts = {row["way"]: row["start_s"] * 1e6 for row in record("preload")["rows"]
              if row["workers"] == workers}  # fmt: skip
    launchers = {row["launcher"]: row for row in record("launch")["rows"]}
    ddp = next(row for row in record("ddp_2")["rows"] if row["what"].startswith("transformer 50M"))
    pairs = all_reduce(2).values()
    ahead = statistics.median(fastest_peer(row) / row["rallypoint"] for row in pairs)

    def lost(name: str, contender: str) -> str:
        return duration(row_of(name, contender=contender)["median_ms"] * 1e3)

    return {
        "workers": str(workers),
        "torchrun": duration(starts["torchrun, gloo"]),
        "run": duration(starts["rallypoint run"]),
        "preload": duration(starts["--preload torch"]),
        "our_mib": f"{launchers['rallypoint']['launcher_mib']:.3g}",
        "torchrun_mib": f"{launchers['torchrun']['launcher_mib']:.3g}",
        "ahead": f"{ahead:.2f}",
        "sizes": str(len(pairs)),
        "model": ddp["what"].partition("(")[2].rstrip(")"),
        "step": duration(ddp["rallypoint"] * 1e6),
        "gloo_step": duration(ddp["gloo"] * 1e6),
        "loss": lost("in_place_peers", "rallypoint"),
        "torchrun_loss": lost("in_place_peers", "torchrun"),
        "ulfm": lost("in_place_peers", "ulfm"),
        "loss_large": lost("in_place_peers_1GiB", "rallypoint"),
        "ulfm_large": lost("in_place_peers_1GiB", "ulfm"),
    }


def operations() -> str:
    """The table of all operations."""
    rows = [
        "| | " + " | ".join(map(bytes_of, SIZES)) + " |",
        "|-" * (len(SIZES) + 1) + "|",
    ]
    for operation in OPERATIONS:
        found = all_reduce(2) if operation == "all_reduce" else times(f"{operation}_2")
        if operation == "barrier":
            found = {SIZES[0]: found[0]}
        cells = []
        for size in SIZES:
            cell = ""
            if size in found:
                ours, peer = found[size]["rallypoint"], fastest_peer(found[size])
                cell = f"{digits(ours)} / {digits(peer)}{' *' if peer < ours else ''}"
            cells.append(cell)
        rows.append(f"| {operation} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def sources() -> str:
    """The table of the figures' records: commands, machines, dates."""
    rows = ["| Figure | Command | Machine, date | File |", "|-|-|-|-|"]
    for what, names in FIGURES.items():
        first = record(names[0])
        operation = names[0].rpartition("_")[0]
        command = re.sub(" --get-mpi| --json [^ ]+", "", first["command"])
        if len(names) > 1:  # the same command for each operation
            command = command.replace(operation, "OPERATION")
        machine = first.get("machine", {})  # `rallypoint bench` describes it in words
        where = (
            first["place"].partition("; load")[0]
            if "place" in first
            else machine.get("gpu", machine["cpu"])
        )
        files = ", ".join(f"[{name}](measurements/{name}.json)" for name in names)
        rows.append(f"| {what} | `{command}` | {where}, {first['date']} | {files} |")
    return "\n".join(rows) + "\n"


def digits(us: float) -> str:
    """Three digits, and all before the point: 0.47, 41.4, 4,490."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def page() -> str:
    """docs/performance.md."""
    return _PAGE.format(**figures(), operations=operations(), sources=sources())


def readme() -> str:
    """README.md, with the table beside torchrun as the records have it."""
    return _with_figures("README.md", _README)


def readme_zh() -> str:
    """The same for README.zh-CN.md."""
    return _with_figures("README.zh-CN.md", _README_ZH)


def _with_figures(name: str, table: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    files = {
        f"{key}_file": f"docs/measurements/{name}.json"
        for key, name in (
            ("preload", "preload"),
            ("launch", "launch"),
            ("loss", "in_place_peers"),
            ("ddp", "ddp_2"),
        )
    }
    table = table.format(**figures(), **files)
    written, count = _MARKED.subn(lambda marks: f"{marks[1]}{table}\n{marks[2]}", text)
    if count != 1:
        raise SystemExit(f"{name}: the marks of its figures are missing")
    return written


def all_reduce_chart() -> str:
    """docs/measurements/all_reduce.svg."""
    panels = {}
    for ranks in (2, 4):
        found = all_reduce(ranks)
        panels[f"all_reduce, {ranks} ranks on 2 cores"] = {
            said: [(size, row[name]) for size, row in found.items() if name in row]
            for name, said in PEERS.items()
            if any(name in row for row in found.values())
        }
    return charts.lines("Time of all_reduce over its size; lower is better", panels)


def beside_others_chart() -> str:
    """docs/measurements/beside_others.svg."""

    def bars(values: dict[str, float]) -> dict[str, tuple[float, str]]:
        return {name: (us, duration(us)) for name, us in values.items()}

    def start(way: str) -> float:
        return float(row_of("preload", way=way, workers=8)["start_s"]) * 1e6

    lost = {row["contender"]: row["median_ms"] * 1e3 for row in record("in_place_peers")["rows"]}
    ddp = next(row for row in record("ddp_2")["rows"] if row["what"].startswith("transformer 50M"))
    gpu = row_of("shared_gpu_2", what="16 MiB")
    panels = {
        "Start: 8 workers with PyTorch on 2 cores": bars({
            "Rallypoint, preload": start("--preload torch"),
            "Rallypoint": start("rallypoint run"),
            "torchrun, gloo": start("torchrun, gloo"),
        }),
        "Loss of one of 4 ranks": bars(
            {said: lost[name] for name, said in LOSS.items() if name in lost}
        ),
        f"A step of DDP, {ddp['what'].partition('(')[2].rstrip(')')}, 2 CPU workers": bars({
            "Rallypoint": ddp["rallypoint"] * 1e6,
            "gloo": ddp["gloo"] * 1e6,
        }),
        "all_reduce of 16 MiB, 2 ranks sharing a GPU": bars({
            "Rallypoint": gpu["rallypoint"],
            "gloo": gpu["gloo"],
        }),
    }  # fmt: skip
    return charts.bars("Start, recovery, a step of DDP, a shared GPU; shorter is better", panels)


def recovery_chart() -> str:
    """docs/measurements/in_place_phases.svg."""
    phases = {row["phase"]: row["ms"] for row in record("in_place_phases")["rows"]}
    total = duration(sum(phases.values()) * 1e3)
    title = f"One of 4 ranks is killed: the others continue after {total}"
    return diagrams.time_line(
        "What happens between a loss and the next correct call", title, phases
    )
