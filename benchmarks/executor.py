"""Does running programs cost anything? The engine against a hand-written loop of the same steps.

    python benchmarks/executor.py [--repeats 21] [--sizes 8 262144 67108864]

Two processes all_reduce float32 in place, in the same native core, in alternation; medians of
nanoseconds per call. Builds benchmarks/executor.cc with CMake first.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from table import human_bytes, print_table, save

from rallypoint.schedule.choose import build, choose
from rallypoint.schedule.encode import encode
from rallypoint.schedule.program import Collective

ROOT = Path(__file__).parent.parent


def build_program() -> Path:
    directory = ROOT / "build" / "benchmarks"
    cmake = shutil.which("cmake", path=sysconfig.get_path("scripts")) or shutil.which("cmake")
    if cmake is None:
        sys.exit("executor.py needs cmake: pip install cmake")
    configure = [cmake, "-S", ROOT, "-B", directory, "-DRALLYPOINT_BENCHMARKS=ON"]
    for command in (configure, [cmake, "--build", directory, "--target", "executor_benchmark"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory / "executor_benchmark"


def measure(program: Path, nbytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """Nanoseconds per call: by the program, by hand."""
    algorithm = choose(Collective.ALL_REDUCE, nbytes=nbytes, ranks=2).algorithm
    assert algorithm == "direct_one_shot", "the hand-written loop is one-shot"
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, str(rank)) for rank in range(2)]
        for rank, path in enumerate(paths):
            path.write_bytes(encode(build(Collective.ALL_REDUCE, algorithm, ranks=2), rank))
        command = [program, str(nbytes), str(repeats), *paths]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    pairs = [line.split() for line in output.splitlines()]
    return [float(pair[0]) for pair in pairs], [float(pair[1]) for pair in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 256 << 10, 64 << 20])
    options = parser.parse_args()
    program = build_program()
    rows = []
    for nbytes in options.sizes:
        by_program, by_hand = measure(program, nbytes, options.repeats)
        ratio = statistics.median(a / b for a, b in zip(by_program, by_hand, strict=True))
        row = {
            "bytes": nbytes,
            "program_ns": statistics.median(by_program),
            "hand_written_ns": statistics.median(by_hand),
            "ratio": ratio,
        }
        rows.append(row)
    print_table(
        ("size", "program us", "by hand us", "ratio"),
        [
            (
                human_bytes(int(row["bytes"])),
                f"{row['program_ns'] / 1e3:.3f}",
                f"{row['hand_written_ns'] / 1e3:.3f}",
                f"{row['ratio']:.3f}",
            )
            for row in rows
        ],
    )
    save("executor", rows)


if __name__ == "__main__":
    main()
