"""Does running programs cost anything? The engine against a hand-written loop of the same steps.

    python benchmarks/executor.py [--repeats 21] [--sizes 8 262144 67108864]

Two processes, one core each, all_reduce float32 in place in the same native core, in turn: from an
encoded program; by hand with the same contract; and bare, which is what the contract (flow control,
call record, checks) costs. Medians. Builds benchmarks/executor.cc with CMake first.
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

from rallypoint.schedule.catalogue import build
from rallypoint.schedule.choose import choose
from rallypoint.schedule.encode import encode
from rallypoint.schedule.program import Collective

ROOT = Path(__file__).parent.parent


def build_program() -> Path:
    directory = ROOT / "build" / "benchmarks"
    cmake = shutil.which("cmake", path=sysconfig.get_path("scripts")) or shutil.which("cmake")
    if cmake is None:
        sys.exit("executor.py needs cmake: pip install cmake")
    configure: list[str | Path] = [cmake, "-S", ROOT, "-B", directory, "-DRALLYPOINT_BENCHMARKS=ON"]
    compile_it: list[str | Path] = [cmake, "--build", directory, "--target", "executor_benchmark"]
    for command in (configure, compile_it):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory / "executor_benchmark"


def measure(program: Path, nbytes: int, repeats: int) -> dict[str, float]:
    algorithm = choose(Collective.ALL_REDUCE, nbytes=nbytes, ranks=2).algorithm
    assert algorithm == "direct_one_shot", "the hand-written loop is one-shot"
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, str(rank)) for rank in range(2)]
        for rank, path in enumerate(paths):
            path.write_bytes(encode(build(Collective.ALL_REDUCE, algorithm, ranks=2), rank))
        command: list[str | Path] = [program, str(nbytes), str(repeats), *paths]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rounds = [[float(word) for word in line.split()] for line in output.splitlines()]
    by_program, by_hand, bare = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        "bytes": nbytes,
        "program_ns": by_program,
        "hand_written_ns": by_hand,
        "bare_ns": bare,
        "ratio": statistics.median(row[0] / row[1] for row in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 256 << 10, 64 << 20])
    options = parser.parse_args()
    program = build_program()
    rows = [measure(program, nbytes, options.repeats) for nbytes in options.sizes]
    print_table(
        ("size", "program us", "by hand us", "ratio", "bare us"),
        [
            (
                human_bytes(int(row["bytes"])),
                f"{row['program_ns'] / 1e3:.3f}",
                f"{row['hand_written_ns'] / 1e3:.3f}",
                f"{row['ratio']:.3f}",
                f"{row['bare_ns'] / 1e3:.3f}",
            )
            for row in rows
        ],
    )
    save("executor", rows)


if __name__ == "__main__":
    main()
