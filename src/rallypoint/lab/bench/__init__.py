"""`rallypoint bench`: compares operations with other libraries, or measures this machine's link
model.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from rallypoint.base.errors import RallypointError
from rallypoint.cli.options import HELP, Flag, FlagGroup, UsageError, describe_groups, parse

if TYPE_CHECKING:
    from rallypoint.lab.bench.bench_request import BenchmarkRequest
    from rallypoint.lab.bench.here import Here
    from rallypoint.lab.bench.on_hosts import ContenderHosts

PROGRAM = "rallypoint bench"

OPERATION = FlagGroup("rallypoint bench OPERATION", (
    Flag("--nproc-per-node", "number of ranks on each host (default 2; 1 with --hosts)", "N"),
    Flag("--hosts", "measure on these hosts, by names that all can resolve, not here", "A,B"),
    Flag("--rsh", "command that runs a program on a host; the host's name replaces\n"
         "{host} or is appended (default: ssh)", "COMMAND"),
    Flag("--sizes", "bytes of the larger buffer, as in nccl-tests: doubling, or a list\n"
         "(default 8:64M)", "A:B|A,B"),
    Flag("--dtype", "float32 (default), float64, float16, int8, int16, int32, int64, uint8",
         "TYPE"),
    Flag("--op", "sum (default), product, min, max", "OP"),
    Flag("--algorithm", "algorithm that our calls must use: a name, or a file of your own", "NAME"),
    Flag("--backend", "our transport: rallypoint (default: all), shm, tcp", "NAME"),
    Flag("--vs", "peers in the same run: gloo, mpich, openmpi, intelmpi, ucx", "A,B"),
    Flag("--mpi-env", "virtual environments with mpi4py and an MPI, or with commux (ucx):\n"
         "mpich=DIR,ucx=DIR (default: RALLYPOINT_MPI_ENV, then the cache)", "A=DIR"),
    Flag("--get-mpi", "install missing MPIs, and commux, from PyPI into the cache"),
    Flag("--pin", "pin each rank of each library to a core; else each uses its default"),
    Flag("--rounds", "number of measurements of each size, taken in turn (default 9)", "N"),
    Flag("--iterations", "calls in a row (default: enough for 20 ms, at least 2)", "N"),
    Flag("--warmup", "calls before those (default: a tenth as many, at least 1)", "N"),
    Flag("--json", "write all times to FILE", "FILE"),
    Flag("--plot", "draw time over size to FILE.png or FILE.html (needs matplotlib)", "FILE"),
    HELP,
))  # fmt: skip

CALIBRATION = FlagGroup("rallypoint bench --calibrate", (
    Flag("--calibrate", "fit a link model to the engine's all_reduce on this machine"),
    Flag("--ranks", "numbers of ranks to measure with (default 2,3,4,6,8)", "N,M"),
    Flag("--rounds", "number of measurements of each size and algorithm (default 40)", "N"),
    Flag("--out", "where to write the model (default this_machine.toml)", "FILE"),
    HELP,
))  # fmt: skip

USAGE = """\
usage: rallypoint bench OPERATION [FLAGS]
       rallypoint bench --calibrate [FLAGS]

Time an operation on one or several machines, check its results on random data, and, with --vs,
measure other libraries in turn in the same run. OPERATION is all_reduce, reduce, broadcast,
all_gather, gather, scatter, reduce_scatter, all_to_all, barrier or send (half of a round trip).

  rallypoint bench all_reduce --nproc-per-node 4
  rallypoint bench all_reduce --vs gloo,mpich,openmpi,intelmpi --get-mpi --plot all_reduce.png

On several hosts, which ssh must reach without a password and which have Rallypoint installed at the
same path; or with --rsh 'srun -n1 --overlap -w', or 'kubectl exec -i {host} --':

  rallypoint bench all_reduce --hosts node1,node2 --nproc-per-node 2 --vs gloo,openmpi

Or measure all_reduce with seven algorithms at 17 sizes, fit a link model to every other size, and
report how far its predictions are from the sizes left out. This takes some minutes. The model is
for `rallypoint simulate --links FILE` and `init_process_group(links=FILE)`.

  rallypoint bench --calibrate --out my_machine.toml

Other work on the machine distorts both.
"""

_STATUS_OK, _STATUS_FAILED, _STATUS_USAGE = 0, 1, 2


def bench(words: Sequence[str]) -> int:
    """Run `rallypoint bench WORDS`; returns the exit status."""
    operation = words[0] if words and not words[0].startswith("-") else ""
    group = OPERATION if operation else CALIBRATION
    try:
        values, rest = parse(words[bool(operation) :], group.flags, program=PROGRAM, environ={})
        if "--help" in values or not words:
            print(USAGE, describe_groups((OPERATION, CALIBRATION)), sep="\n")
            return _STATUS_OK if words else _STATUS_USAGE
        if rest:
            raise UsageError(f"{PROGRAM}: unexpected argument {rest[0]!r}; see {PROGRAM} --help.")
        return _compare(operation, values) if operation else _calibrate(values)
    except UsageError as error:
        print(error, file=sys.stderr)
        return _STATUS_USAGE
    except BrokenPipeError:
        raise
    except (RallypointError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return _STATUS_FAILED


def _compare(operation: str, values: Mapping[str, str]) -> int:
    from rallypoint.lab.bench.bench_request import environments_named, request_of
    from rallypoint.lab.bench.contenders import OURS
    from rallypoint.lab.bench.contest import Contest
    from rallypoint.lab.bench.results import Table, write_json

    request = request_of(operation, values)
    named = environments_named(values.get("--mpi-env", os.environ.get("RALLYPOINT_MPI_ENV", "")))
    for flag in ("--json", "--plot"):
        _check_writable(flag, values.get(flag))
    if "--plot" in values:
        from rallypoint.lab.figure import check_plot

        check_plot(values["--plot"])
    signal.signal(signal.SIGTERM, _terminated)
    place = _place(request, named, values)
    rows = []
    with Contest(request, place) as contest:
        versions, where = contest.versions, place.describe()
        table = Table(request, versions, where)
        for row in contest.rows():
            table.add(row)
            rows.append(row)
        table.end(place.load())
    if "--json" in values:
        write_json(values["--json"], request, versions, where, rows)
    if "--plot" in values:
        from rallypoint.lab.bench.results import plot

        plot(values["--plot"], request, versions, rows)
    return _STATUS_FAILED if any(row.wrong[OURS] for row in rows) else _STATUS_OK


def _place(
    request: BenchmarkRequest, named: Mapping[str, Path], values: Mapping[str, str]
) -> Here | ContenderHosts:
    """The place where all contenders run; `named` gives environments of some."""
    make = "--get-mpi" in values
    if request.hosts:
        from rallypoint.cluster.remote_shell import SSH
        from rallypoint.lab.bench.on_hosts import ContenderHosts

        begin = {
            "contenders": request.peers,
            "mpi": {name: str(prefix) for name, prefix in named.items()},
            "make": make,
            "pin": request.pin,
        }
        rsh = shlex.split(values["--rsh"]) if "--rsh" in values else SSH
        return ContenderHosts(request.hosts, rsh, ranks=request.ranks_per_host, begin=begin)
    from rallypoint.lab.bench.contenders import check
    from rallypoint.lab.bench.environments import Environments, default_cache
    from rallypoint.lab.bench.here import Here

    environments = Environments(named, default_cache(), make=make)
    for name in request.peers:
        check(name, environments)
    return Here(request.ranks, environments, pin=request.pin)


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise SystemExit(128 + number)


def _check_writable(flag: str, path: str | None) -> None:
    """Find out before measuring whether the file can be written."""
    if path is not None and not os.access(Path(path).parent, os.W_OK):
        raise UsageError(f"{PROGRAM}: {flag} {path}: that directory does not exist.")


def _calibrate(values: Mapping[str, str]) -> int:
    if "--calibrate" not in values:
        raise UsageError(
            f"{PROGRAM}: say what to measure: --calibrate, or an operation such as all_reduce."
        )
    out = values.get("--out", "this_machine.toml")
    if not out.endswith(".toml"):
        raise UsageError(f"{PROGRAM}: --out {out} must end in .toml, as link models do.")
    ranks = {_count(word, "--ranks") for word in values.get("--ranks", "2,3,4,6,8").split(",")}
    rounds = _count(values.get("--rounds", "40"), "--rounds")

    import statistics
    from pathlib import Path

    from rallypoint.lab.bench.calibrate import calibrate, p95

    found = calibrate(sorted(ranks), name=Path(out).stem, rounds=rounds)
    Path(out).write_text(found.model)
    noise = [error.measured.noise for error in found.errors]
    print(
        f"{len(found.errors)} predictions at sizes left out of the fit: half are within "
        f"{found.median_error:.1%} of the measured time, 95% within {found.p95_error:.1%}. Two "
        f"halves of one measurement differ by {statistics.median(noise):.1%}, and 95% of them by "
        f"{p95(noise):.1%} at most."
    )
    print(f"written to {out}")
    return _STATUS_OK


def _count(word: str, flag: str) -> int:
    if not word.isascii() or not word.isdigit() or int(word) < 2:
        raise UsageError(f"{PROGRAM}: {flag} needs integers of at least 2, not {word!r}.")
    return int(word)
