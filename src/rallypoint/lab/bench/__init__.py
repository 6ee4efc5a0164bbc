"""`rallypoint bench`: compares operations with other libraries, or measures this machine's link
model.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from rallypoint.base.address import is_loopback
from rallypoint.base.collective import Collective
from rallypoint.base.errors import RallypointError
from rallypoint.cli.flags import read_command
from rallypoint.cli.options import HELP, Flag, Options, UsageError, integer, perform, reader, text
from rallypoint.cluster.remote_shell import is_host_name
from rallypoint.lab.bench.contenders import PACKAGES, PEERS
from rallypoint.lab.quantities import doubling

if TYPE_CHECKING:
    from rallypoint.lab.bench.crew import LocalStarter
    from rallypoint.lab.bench.on_hosts import ContenderHosts

PROGRAM = "rallypoint bench"
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
# The operations that contender_worker.py runs with every contender.
OPERATIONS = (
    "all_reduce", "broadcast", "all_gather", "barrier", "send", "reduce", "gather", "scatter",
    "reduce_scatter", "all_to_all",
)  # fmt: skip
ITEM_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1,
}  # fmt: skip
OPERATORS = ("sum", "product", "min", "max")


def _at_least(least: int, noun: str = "an integer") -> Callable[[str, str], int]:
    return reader(
        lambda text: integer(text, least),
        f"{{name}} needs {noun} of at least {least}, not {{text!r}}.",
    )


def _known(*known: str) -> Callable[[str, str], str]:
    """A reader that takes these only."""
    same = {each: each for each in known}
    return reader(same.__getitem__, f"{{name}} {{text}} is unknown; it takes {', '.join(known)}.")


_several = _at_least(2, "integers")


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def environments_named(text: str, flag: str) -> dict[str, Path]:
    """``"mpich=/path,openmpi=/other"`` -> prefixes by contender."""
    named = {}
    for word in _words(text):
        name, _, prefix = word.partition("=")
        if name not in PACKAGES or not prefix:
            raise UsageError(f"{flag} {word} is not NAME=DIR, with one of {', '.join(PACKAGES)}.")
        named[name] = Path(prefix).absolute()
    return named


def _read_sizes(text: str, flag: str) -> list[int]:
    return [nbytes for word in text.split(",") for nbytes in doubling(word, flag)]


def _read_hosts(text: str, flag: str) -> tuple[str, ...]:
    hosts = _words(text)
    for host in hosts:
        if ":" in host or not is_host_name(host):
            raise UsageError(
                f"{flag} {host} is not a host name; --nproc-per-node gives the number of ranks on"
                " each host."
            )
        if is_loopback(host) and not all(map(is_loopback, hosts)):
            raise UsageError(
                f"{flag} {host} is a name that other hosts cannot resolve; give one that they can."
            )
        if hosts.count(host) > 1:
            raise UsageError(f"{flag} names {host} twice; name it once.")
    if not hosts:
        raise UsageError(f"{flag} names no host.")
    return hosts


# fmt: off
class BenchmarkOptions(Options, title="rallypoint bench OPERATION"):
    """The flags for an operation."""

    nproc_per_node = Flag("number of ranks on each host (default 2; 1 with --hosts)", "N",
                          _at_least(1), None)
    hosts = Flag("measure on these hosts, by names that all can resolve, not here", "A,B",
                 _read_hosts, ())
    rsh = Flag("command that runs a program on a host; the host's name replaces\n"
               "{host} or is appended (default: ssh)", "COMMAND", read_command, None)
    sizes = Flag("bytes of the larger buffer, as in nccl-tests: doubling, or a list\n"
                 "(default 8:64M)", "A:B|A,B", _read_sizes, doubling("8:64M", "--sizes"))
    dtype = Flag("float32 (default), float64, float16, int8, int16, int32, int64, uint8",
                 "TYPE", _known(*ITEM_BYTES), "float32", completes=" ".join(ITEM_BYTES))
    op = Flag("sum (default), product, min, max", "OP", _known(*OPERATORS), "sum",
              completes=" ".join(OPERATORS))
    algorithm = Flag("algorithm for Rallypoint's calls: a name, or a file", "NAME",
                     text, "")
    backend = Flag("Rallypoint's transport: rallypoint (default: all), shm, tcp", "NAME",
                   _known("rallypoint", "shm", "tcp"), "rallypoint",
                   completes="rallypoint shm tcp")
    vs = Flag("peers in the same run: gloo, mpich, openmpi, intelmpi, ucx", "A,B",
              lambda text, flag: tuple(_known(*PEERS)(word, flag) for word in _words(text)), ())
    mpi_env = Flag("virtual environments with mpi4py and an MPI, or with commux (ucx):\n"
                   "mpich=DIR,ucx=DIR (default: RALLYPOINT_MPI_ENV, then the cache)", "A=DIR",
                   environments_named, None)
    get_mpi = Flag.switch("install missing MPIs, and commux, from PyPI into the cache")
    pin = Flag.switch("pin each rank of each library to a core; else each uses its default")
    rounds = Flag("number of measurements of each size, taken in turn (default 9)", "N",
                  _at_least(1), 9)
    iterations = Flag("calls in a row (default: enough for 20 ms, at least 2)", "N",
                      _at_least(1), None)
    warmup = Flag("calls before those (default: a tenth as many, at least 1)", "N",
                  _at_least(0), None)
    json = Flag("write all times to FILE", "FILE", text, None)
    plot = Flag("draw time over size to FILE.png or FILE.html (needs matplotlib)", "FILE",
                text, None)
    help = HELP


class CalibrationOptions(Options, title="rallypoint bench --calibrate"):
    """The flags for a link model."""

    calibrate = Flag.switch("fit a link model to the engine's all_reduce on this machine")
    ranks = Flag("numbers of ranks to measure with (default 2,3,4,6,8)", "N,M",
                 lambda text, flag: sorted({_several(word, flag) for word in text.split(",")}),
                 [2, 3, 4, 6, 8])
    rounds = Flag("number of measurements of each size and algorithm (default 40)", "N",
                  _several, 40)
    out = Flag("where to write the model (default this_machine.toml)", "FILE",
               text, "this_machine.toml")
    help = HELP
# fmt: on


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    """One request.

    Attributes:
        ranks: the number on all hosts together.
        hosts: their names; empty for this machine alone.
        counts: how many items each rank contributes, or sends to each rank (or receives, where it
            contributes none).
        calls, warmup: how many calls in a row are timed, and how many untimed ones precede them;
            None: depends on the size.
    """

    operation: str
    ranks: int
    counts: tuple[int, ...]
    dtype: str
    op: str
    algorithm: str
    backend: str
    rounds: int
    calls: int | None
    warmup: int | None
    peers: tuple[str, ...]
    pin: bool
    hosts: tuple[str, ...]

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on each host, the same on all."""
        return self.ranks // max(1, len(self.hosts))

    @property
    def collective(self) -> Collective:
        """The operation as a member of the enumeration."""
        return Collective[self.operation.upper()]

    def bytes_of(self, count: int) -> int:
        """The size of the larger buffer, as nccl-tests count it."""
        return count * self.collective.most_blocks(self.ranks) * ITEM_BYTES[self.dtype]


def request_of(operation: str, options: BenchmarkOptions) -> BenchmarkRequest:
    """Read the flags."""
    if operation not in OPERATIONS:
        raise UsageError(f"unknown operation {operation!r}; choose one of {', '.join(OPERATIONS)}.")
    hosts = options.hosts
    if options.rsh is not None and not hosts:
        raise UsageError("--rsh needs --hosts, which it says how to reach.")
    ranks = (options.nproc_per_node or (1 if hosts else 2)) * max(1, len(hosts))
    if operation == "send" and ranks < 2:
        raise UsageError("send takes two ranks; pass --nproc-per-node 2.")
    item_bytes = ITEM_BYTES[options.dtype] * Collective[operation.upper()].most_blocks(ranks)
    # In the given order.
    counts = tuple({max(1, nbytes // item_bytes): None for nbytes in options.sizes})
    return BenchmarkRequest(
        operation=operation,
        ranks=ranks,
        counts=(0,) if operation == "barrier" else counts,
        dtype=options.dtype,
        op=options.op,
        algorithm=options.algorithm,
        backend=options.backend,
        rounds=options.rounds,
        calls=options.iterations,
        warmup=options.warmup,
        peers=options.vs,
        pin=options.pin,
        hosts=hosts,
    )


def bench(words: Sequence[str]) -> int:
    """Run `rallypoint bench WORDS`; returns the exit status."""
    operation = words[0] if words and not words[0].startswith("-") else ""
    run = partial(
        perform,
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
    starter = _starter(request, named, options)
    rows = []
    with Contest(request, starter) as contest:
        versions, where = contest.versions, starter.describe()
        table = Table(request, versions, where)
        for row in contest.rows():
            table.add(row)
            rows.append(row)
        table.end(starter.load())
    if options.json is not None:
        write_json(options.json, request, versions, where, rows)
    if options.plot is not None:
        plot(options.plot, request, versions, rows)
    return _STATUS_FAILED if any(row.wrong[OURS] for row in rows) else _STATUS_OK


def _starter(
    request: BenchmarkRequest, named: Mapping[str, Path], options: BenchmarkOptions
) -> LocalStarter | ContenderHosts:
    """What starts all contenders; `named` gives environments of some."""
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
    from rallypoint.lab.bench.contenders import Environments, check, default_cache
    from rallypoint.lab.bench.crew import LocalStarter

    environments = Environments(named, default_cache(), make=make)
    for name in request.peers:
        check(name, environments)
    return LocalStarter(request.ranks, environments, pin=request.pin)


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
