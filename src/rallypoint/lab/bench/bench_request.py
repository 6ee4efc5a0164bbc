"""The flags of `rallypoint bench`, and the request that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rallypoint.base.address import is_loopback
from rallypoint.base.collective import Collective
from rallypoint.cli.flags import read_command
from rallypoint.cli.options import HELP, Flag, Options, UsageError, integer, reader, switch, text
from rallypoint.cluster.remote_shell import is_host_name
from rallypoint.lab.bench.contenders import PEERS
from rallypoint.lab.bench.environments import PACKAGES
from rallypoint.lab.quantities import doubling

PROGRAM = "rallypoint bench"
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
                 "TYPE", _known(*ITEM_BYTES), "float32")
    op = Flag("sum (default), product, min, max", "OP", _known(*OPERATORS), "sum")
    algorithm = Flag("algorithm that our calls must use: a name, or a file of your own", "NAME",
                     text, "")
    backend = Flag("our transport: rallypoint (default: all), shm, tcp", "NAME",
                   _known("rallypoint", "shm", "tcp"), "rallypoint")
    vs = Flag("peers in the same run: gloo, mpich, openmpi, intelmpi, ucx", "A,B",
              lambda text, flag: tuple(_known(*PEERS)(word, flag) for word in _words(text)), ())
    mpi_env = Flag("virtual environments with mpi4py and an MPI, or with commux (ucx):\n"
                   "mpich=DIR,ucx=DIR (default: RALLYPOINT_MPI_ENV, then the cache)", "A=DIR",
                   environments_named, None)
    get_mpi = switch("install missing MPIs, and commux, from PyPI into the cache")
    pin = switch("pin each rank of each library to a core; else each uses its default")
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

    calibrate = switch("fit a link model to the engine's all_reduce on this machine")
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

    @property
    def is_reducing(self) -> bool:
        """Whether the operation has an operator."""
        return self.collective.reduces

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
