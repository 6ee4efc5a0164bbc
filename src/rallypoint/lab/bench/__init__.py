"""`rallypoint bench`: compares operations with other libraries, or measures this machine's link
model.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from rallypoint.base.errors import RallypointError
from rallypoint.cli.options import UsageError, run_command
from rallypoint.lab.bench.bench_request import (
    PROGRAM,
    BenchmarkOptions,
    CalibrationOptions,
    environments_named,
    request_of,
)

if TYPE_CHECKING:
    from rallypoint.lab.bench.bench_request import BenchmarkRequest
    from rallypoint.lab.bench.here import Here
    from rallypoint.lab.bench.on_hosts import ContenderHosts

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
    run = partial(
        run_command,
        PROGRAM,
        words[bool(operation) :] if words else ["--help"],
        usage=USAGE,
        groups=(*BenchmarkOptions.groups, *CalibrationOptions.groups),
        statuses=((RallypointError, _STATUS_FAILED), (OSError, _STATUS_FAILED)),
    )
    if operation:
        return run(BenchmarkOptions, partial(_compare, operation))
    status = run(CalibrationOptions, _calibrate)
    return status if words else _STATUS_USAGE


def _refuse(rest: Sequence[str]) -> None:
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; see {PROGRAM} --help.")


def _compare(operation: str, options: BenchmarkOptions, rest: list[str]) -> int:
    from rallypoint.lab.bench.contenders import OURS
    from rallypoint.lab.bench.contest import Contest
    from rallypoint.lab.bench.results import Table, plot, write_json

    _refuse(rest)
    request = request_of(operation, options)
    named = options.mpi_env
    if named is None:
        named = environments_named(os.environ.get("RALLYPOINT_MPI_ENV", ""), "--mpi-env")
    _check_writable("--json", options.json)
    _check_writable("--plot", options.plot)
    if options.plot is not None:
        from rallypoint.lab.figure import check_plot

        check_plot(options.plot)
    signal.signal(signal.SIGTERM, _terminated)
    place = _place(request, named, options)
    rows = []
    with Contest(request, place) as contest:
        versions, where = contest.versions, place.describe()
        table = Table(request, versions, where)
        for row in contest.rows():
            table.add(row)
            rows.append(row)
        table.end(place.load())
    if options.json is not None:
        write_json(options.json, request, versions, where, rows)
    if options.plot is not None:
        plot(options.plot, request, versions, rows)
    return _STATUS_FAILED if any(row.wrong[OURS] for row in rows) else _STATUS_OK


def _place(
    request: BenchmarkRequest, named: Mapping[str, Path], options: BenchmarkOptions
) -> Here | ContenderHosts:
    """The place where all contenders run; `named` gives environments of some."""
    make = options.get_mpi
    if request.hosts:
        from rallypoint.cluster.remote_shell import SSH
        from rallypoint.lab.bench.on_hosts import ContenderHosts

        begin = {
            "contenders": request.peers,
            "mpi": {name: str(prefix) for name, prefix in named.items()},
            "make": make,
            "pin": request.pin,
        }
        rsh = options.rsh or SSH
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
        raise UsageError(f"{flag} {path}: that directory does not exist.")


def _calibrate(options: CalibrationOptions, rest: list[str]) -> int:
    _refuse(rest)
    if not options.calibrate:
        raise UsageError("say what to measure: --calibrate, or an operation such as all_reduce.")
    ranks, rounds, out = options.ranks, options.rounds, options.out
    if not out.endswith(".toml"):
        raise UsageError(f"--out {out} must end in .toml, as link models do.")

    import statistics
    from pathlib import Path

    from rallypoint.lab.bench.calibrate import calibrate, p95

    found = calibrate(ranks, name=Path(out).stem, rounds=rounds)
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
