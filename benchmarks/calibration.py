"""How well do simulations predict the engine on this machine, after calibration?

    python benchmarks/calibration.py [--ranks 2 3 4] [--model FILE.toml] [--plot FILE.png]

Measures all_reduce with every algorithm at 17 sizes, fits a link model to every other size, and
compares predicted with measured times at the sizes left out. The noise is how far two halves of a
measurement are apart: no model can do better. Takes some minutes. Other work on the machine shows:
how much there was is told.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from table import human_bytes, need, print_table, save

from rallypoint.lab.bench.calibrate import RANKS, Calibration, calibrate, p95


def report(calibration: Calibration) -> None:
    rows = []
    for ranks in sorted({error.measured.ranks for error in calibration.errors}):
        relative = sorted(e.relative for e in calibration.errors if e.measured.ranks == ranks)
        noise = [e.measured.noise for e in calibration.errors if e.measured.ranks == ranks]
        others = next(e.measured.others for e in calibration.errors if e.measured.ranks == ranks)
        rows.append((*_row(str(ranks), relative, noise), f"{others:.1f}"))
    noise = [error.measured.noise for error in calibration.errors]
    rows.append((*_row("all", [error.relative for error in calibration.errors], noise), ""))
    columns = ("ranks", "predictions", "error", "95%", "noise", "95%", "cores taken by others")
    print_table(columns, rows)


def _row(ranks: str, errors: list[float], noise: list[float]) -> tuple[str, ...]:
    """Medians and 95th percentiles of what is predicted wrongly, and of what is not reproduced."""
    shares = (statistics.median(errors), p95(errors), statistics.median(noise), p95(noise))
    return (ranks, str(len(errors)), *(f"{share:.1%}" for share in shares))


def scatter(path: str, calibration: Calibration) -> None:
    """Predicted over measured times, and the lines of 30% error."""
    if not need("matplotlib", "no plot (pip install matplotlib)"):
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    for ranks in sorted({error.measured.ranks for error in calibration.errors}):
        errors = [error for error in calibration.errors if error.measured.ranks == ranks]
        measured = [error.measured.time_us for error in errors]
        predicted = [error.predicted_us for error in errors]
        axes.scatter(measured, predicted, s=9, label=f"{ranks} ranks")
    ends = [0.5, 5e4]
    for factor, style in ((1.0, "-"), (1.3, ":"), (1 / 1.3, ":")):
        axes.plot(ends, [end * factor for end in ends], style, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, us", ylabel="predicted, us")
    axes.set_title("all_reduce at sizes that the model was not fitted to", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    print(f"written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--model", metavar="FILE", help="write the fitted link model")
    parser.add_argument("--plot", metavar="FILE", help="write a scatter plot")
    options = parser.parse_args()
    calibration = calibrate(options.ranks)
    report(calibration)
    save(
        "calibration",
        [
            {
                "algorithm": error.measured.algorithm,
                "ranks": error.measured.ranks,
                "size": human_bytes(error.measured.nbytes),
                "measured_us": error.measured.time_us,
                "predicted_us": error.predicted_us,
                "noise": error.measured.noise,
                "others": error.measured.others,
            }
            for error in calibration.errors
        ],
    )
    if options.model:
        Path(options.model).write_text(calibration.model)
        print(f"written to {options.model}")
    if options.plot:
        scatter(options.plot, calibration)


if __name__ == "__main__":
    main()
