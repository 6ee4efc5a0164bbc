"""Measures the engine on this machine and fits a link model to it.

`calibrate` is what `rallypoint bench --calibrate` and benchmarks/calibration.py call. Every second
size is left out of the fit, so the reported error is that of predictions. The difference between
the two halves of one measurement shows how much of that error no model could avoid.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.base.errors import HostError
from rallypoint.schedule.cost.calibration import Error, Measurement, fit, predict, to_toml

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


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted model, and how well it predicts sizes that it was not fitted to."""

    model: str  # TOML
    errors: list[Error]
    measurements: list[Measurement]

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
    ranks: Sequence[int] = RANKS,
    algorithms: Sequence[str] = ALGORITHMS,
    *,
    name: str = "this_machine",
    rounds: int = ROUNDS,
) -> Calibration:
    """Measure and fit; this takes some minutes."""
    measured = [row for count in ranks for row in measure(count, algorithms, rounds)]
    return calibration_of(measured, name=name)


def calibration_of(measured: Sequence[Measurement], *, name: str) -> Calibration:
    """Fit a model to the fitted sizes, and predict the others."""
    fitted = [row for row in measured if row.nbytes in FITTED_SIZES]
    left_out = [row for row in measured if row.nbytes not in FITTED_SIZES]
    cores = len(os.sched_getaffinity(0))
    links = fit(fitted, block_bytes=BLOCK_BYTES, slots=SLOTS, cores=cores)
    most = max(row.ranks for row in measured)
    source = f"rallypoint bench --calibrate, 2 to {most} ranks"
    return Calibration(
        to_toml(links, name=name, source=source), predict(links, left_out), list(measured)
    )


def measure(ranks: int, algorithms: Sequence[str], rounds: int) -> list[Measurement]:
    """Measure all algorithms and sizes, with this many processes."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "rows.json")
        sizes = ",".join(str(size) for size in (*FITTED_SIZES, *LEFT_OUT_SIZES))
        command = [sys.executable, "-m", "rallypoint", "run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "rallypoint.lab.bench.calibrate_worker"]
        result = subprocess.run(
            [*command, str(file), ",".join(algorithms), sizes, str(rounds)],
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
