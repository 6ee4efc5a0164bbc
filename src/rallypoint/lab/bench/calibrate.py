"""Measures the engine on this machine and fits a link model to it: finds the constants whose
simulations come closest to the measured times.

`calibrate` is what `rallypoint bench --calibrate` and benchmarks/calibration.py call. Every second
size is left out of the fit, so the reported error is that of predictions. The difference between
the two halves of one measurement shows how much of that error no model could avoid.

For each number of ranks there are five constants: the costs of a call, of a message, of its
latency, and of each byte sent and reduced. Simulated time is piecewise linear in them, so a few
rounds of least squares on the relative errors find them. The extra cost of larger calls, which
overflow the caches, is fitted last.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rallypoint.base.errors import HostError
from rallypoint.schedule.catalogue import build
from rallypoint.schedule.cost.links import Level, Links
from rallypoint.schedule.cost.simulation.prices import Floats, cut, slowed
from rallypoint.schedule.cost.simulation.wave import Graph
from rallypoint.schedule.program import Collective

ALGORITHMS = (
    "direct_one_shot",
    "direct_two_shot",
    "ring",
    "binomial_tree",
    "binary_tree",
    "double_tree",
    "halving_doubling",
)
FITTED_SIZES = tuple(8 << shift for shift in range(0, 22, 3))  # 8 B, 64 B, ..., 16 MiB
LEFT_OUT_SIZES = (32, 256, 2048, 8192, 65536, 131072, 524288, 1 << 20, 8 << 20)
RANKS = (2, 3, 4, 6, 8)
ROUNDS = 40
BLOCK_BYTES = 256 << 10  # the engine's value (native/engine/layout.h)
SLOTS = 4
CACHED_BYTES = 256 << 10  # up to here, each byte has the same cost
_FIT_ROUNDS = 12
_NUDGE = 0.05
_FIRST_GUESS = (0.5, 0.2, 0.5, 1e-4, 1e-4)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured time of an all_reduce.

    Attributes:
        noise: the difference between its two halves, as a share of the shorter one.
        others: how many cores other processes used meanwhile.
    """

    algorithm: str
    ranks: int
    nbytes: int
    time_us: float
    noise: float = 0.0
    others: float = 0.0


@dataclass(frozen=True, slots=True)
class Error:
    """A measured and a predicted time."""

    measured: Measurement
    predicted_us: float

    @property
    def relative(self) -> float:
        """The relative error, as a share of the measured time."""
        return abs(self.predicted_us / self.measured.time_us - 1)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted model, and how well it predicts sizes that it was not fitted to."""

    model: str  # TOML
    errors: list[Error]

    @property
    def median_error(self) -> float:
        """The median, as a share of the measured time."""
        return statistics.median(error.relative for error in self.errors)

    @property
    def p95_error(self) -> float:
        """The 95th percentile."""
        return p95(error.relative for error in self.errors)


def p95(values: Iterable[float]) -> float:
    """The 95th percentile."""
    ordered = sorted(values)
    return ordered[int(0.95 * (len(ordered) - 1))]


def calibrate(
    ranks: Sequence[int] = RANKS, *, name: str = "this_machine", rounds: int = ROUNDS
) -> Calibration:
    """Measure, fit a model to the fitted sizes, and predict the others; this takes some minutes."""
    measured = [row for count in ranks for row in measure(count, rounds)]
    fitted = [row for row in measured if row.nbytes in FITTED_SIZES]
    left_out = [row for row in measured if row.nbytes not in FITTED_SIZES]
    cores = len(os.sched_getaffinity(0))
    links = fit(fitted, cores=cores)
    most = max(row.ranks for row in measured)
    source = f"rallypoint bench --calibrate, 2 to {most} ranks"
    return Calibration(to_toml(links, name=name, source=source), predict(links, left_out))


def measure(ranks: int, rounds: int) -> list[Measurement]:
    """Measure all algorithms and sizes, with this many processes."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "rows.json")
        sizes = ",".join(str(size) for size in (*FITTED_SIZES, *LEFT_OUT_SIZES))
        command = [sys.executable, "-m", "rallypoint", "run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "rallypoint.lab.bench.calibrate_worker"]
        result = subprocess.run(
            [*command, str(file), ",".join(ALGORITHMS), sizes, str(rounds)],
            check=False,
            capture_output=True,
            text=True,
        )
        if result.returncode != 0:
            raise HostError(f"measuring with {ranks} ranks failed: {result.stderr[-500:]}")
        found = json.loads(file.read_text())
    disturbed: list[float] = found["disturbed"]
    by_quiet = sorted(range(len(disturbed)), key=disturbed.__getitem__)
    quiet = sorted(by_quiet[: max(2, len(by_quiet) // 2)])
    others = statistics.median(disturbed[number] for number in quiet)
    return [_measurement(row, quiet, others) for row in found["rows"]]


def _measurement(row: dict[str, Any], quiet: Sequence[int], others: float) -> Measurement:
    """The lower quartile of the quieter rounds: other load on the machine only adds time."""
    times_us = [row["times_us"][number] for number in quiet]
    middle = len(times_us) // 2
    one, other = _quartile(times_us[:middle]), _quartile(times_us[middle:])
    return Measurement(
        row["algorithm"],
        row["ranks"],
        row["bytes"],
        _quartile(times_us),
        noise=max(one, other) / min(one, other) - 1,
        others=others,
    )


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def fit(measurements: Sequence[Measurement], *, cores: int) -> Links:
    """Fit the links, with a crowd for each measured number of ranks.

    Args:
        cores: how many the ranks had; if fewer than ranks, they took turns.
    """
    by_ranks: dict[int, list[Measurement]] = {}
    for each in measurements:
        by_ranks.setdefault(each.ranks, []).append(each)
    crowds = [(ranks, _fit(ranks, rows, cores)) for ranks, rows in sorted(by_ranks.items())]
    return replace(crowds[0][1], crowds=tuple(crowds))


def predict(links: Links, measurements: Iterable[Measurement]) -> list[Error]:
    """Pair measured times with simulated ones."""
    errors = []
    graphs: dict[tuple[str, int], Graph] = {}
    for each in measurements:
        key = (each.algorithm, each.ranks)
        if key not in graphs:
            program = build(Collective.ALL_REDUCE, each.algorithm, ranks=each.ranks)
            graphs[key] = Graph(program, links.on(each.ranks))
        errors.append(Error(each, _time_us(graphs[key], each.nbytes)))
    return errors


def to_toml(links: Links, *, name: str, source: str) -> str:
    """The text of the model's file (read by links.parse_model)."""
    most = max(ranks for ranks, _ in links.crowds)
    lines = [f'name = "{name}"', f'source = "{source}"', f"measured_ranks = {most}"]
    lines += [f"per_node = {most}", "multicast = true", "shares_core = true"]
    lines += [f"cores = {links.cores}"]
    lines += [f"slots = {links.slots}", f"block_bytes = {links.block_bytes}"]
    lines += _constants(links, "")
    for ranks, crowd in links.crowds:
        lines += ["", f"[crowd.{ranks}]", *_constants(crowd, f"crowd.{ranks}.")]
    return "\n".join(lines) + "\n"


def _constants(links: Links, prefix: str) -> list[str]:
    (level, *_) = links.levels
    points = ", ".join(f"[{size:.0f}, {times:.3g}]" for size, times in links.slowdown)
    return [
        f"start_us = {links.start_us:.4g}",
        f"reduce_gb_per_s = {links.reduce_gb_per_s:.4g}",
        f"slowdown = [{points}]",
        f"[{prefix}level.node]",
        f"latency_us = {level.latency_us:.4g}",
        f"overhead_us = {level.overhead_us:.4g}",
        f"gb_per_s = {level.gb_per_s:.4g}",
    ]


def _time_us(graph: Graph, nbytes: int) -> float:
    links = graph.links
    pieces = slowed(cut(graph.program, nbytes, links), nbytes, links)
    busy_us = graph.load.bound_us(links, pieces)[1]
    return links.start_us + max(float(graph.run(pieces).max()), busy_us)


def _fit(ranks: int, rows: Sequence[Measurement], cores: int) -> Links:
    def links_of(logs: Floats) -> Links:
        start, latency, overhead, send, reduce = (float(each) for each in np.exp(logs))
        level = Level("node", ranks, latency, overhead, 1 / send / 1e3)
        return Links(
            "calibrated",
            (level,),
            start_us=start,
            reduce_gb_per_s=1 / reduce / 1e3,
            slots=SLOTS,
            block_bytes=BLOCK_BYTES,
            cores=cores,
            multicast=True,
            shares_core=True,
        )

    guess = np.log(_FIRST_GUESS)
    names = sorted({row.algorithm for row in rows})
    graphs = {
        name: Graph(build(Collective.ALL_REDUCE, name, ranks=ranks), links_of(guess))
        for name in names
    }
    cached = [row for row in rows if row.nbytes <= CACHED_BYTES]

    def log_times(logs: Floats) -> Floats:
        links = links_of(logs)
        priced = {name: graph.repriced(links) for name, graph in graphs.items()}
        return np.log([_time_us(priced[row.algorithm], row.nbytes) for row in cached])

    logs = _least_squares(log_times, np.log([row.time_us for row in cached]), guess)
    links = links_of(logs)
    priced = {name: graph.repriced(links) for name, graph in graphs.items()}
    return replace(links, slowdown=_slowdown(priced, rows))


def _least_squares(function: Callable[[Floats], Floats], wanted: Floats, guess: Floats) -> Floats:
    """The Gauss-Newton method, with less weight on outliers; returns the best of all rounds."""
    logs, best, best_error = guess, guess, math.inf
    for _ in range(_FIT_ROUNDS):
        now = function(logs)
        off = wanted - now
        error = float(np.abs(off).mean())
        if error < best_error:
            best, best_error = logs, error
        columns = []
        for index in range(len(logs)):
            moved = logs.copy()
            moved[index] += _NUDGE
            columns.append((function(moved) - now) / _NUDGE)
        weights = 1 / np.sqrt(np.maximum(np.abs(off), 0.05))
        slopes = np.stack(columns, axis=1) * weights[:, None]
        square = slopes.T @ slopes + 1e-2 * np.eye(len(logs))
        step = np.linalg.solve(square, slopes.T @ (off * weights))
        logs = logs + np.clip(step, -1, 1)
    return best


def _slowdown(
    graphs: dict[str, Graph], rows: Sequence[Measurement]
) -> tuple[tuple[float, float], ...]:
    """For each size larger than the caches, how much more a byte costs there."""
    points = [(float(CACHED_BYTES), 1.0)]
    for nbytes in sorted({row.nbytes for row in rows if row.nbytes > CACHED_BYTES}):
        factors = []
        for row in rows:
            if row.nbytes == nbytes:
                graph = graphs[row.algorithm]
                once = _time_us(graph, nbytes)
                fixed = _time_us(graph, 0)
                factors.append((row.time_us - fixed) / max(once - fixed, 1e-9))
        points.append((float(nbytes), float(np.clip(np.median(factors), 0.2, 20))))
    return tuple(points)
