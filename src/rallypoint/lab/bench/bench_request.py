"""The request to `rallypoint bench OPERATION`, read from its flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rallypoint.base.address import is_loopback
from rallypoint.base.collective import Collective
from rallypoint.cli.options import UsageError
from rallypoint.cli.quantities import doubling
from rallypoint.cluster.remote_shell import is_host_name
from rallypoint.lab.bench.contenders import PEERS
from rallypoint.lab.bench.environments import PACKAGES

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
_BACKENDS = ("rallypoint", "shm", "tcp")


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


def request_of(operation: str, values: Mapping[str, str]) -> BenchmarkRequest:
    """Read the flags."""
    if operation not in OPERATIONS:
        raise UsageError(
            f"{PROGRAM}: unknown operation {operation!r}; choose one of {', '.join(OPERATIONS)}."
        )
    hosts = _hosts(values)
    ranks = _whole("--nproc-per-node", values.get("--nproc-per-node", "1" if hosts else "2"))
    ranks *= max(1, len(hosts))
    if operation == "send" and ranks < 2:
        raise UsageError(f"{PROGRAM}: send takes two ranks; pass --nproc-per-node 2.")
    dtype = _one_of("--dtype", values.get("--dtype", "float32"), tuple(ITEM_BYTES))
    item_bytes = ITEM_BYTES[dtype] * Collective[operation.upper()].most_blocks(ranks)
    sizes = [
        nbytes
        for word in values.get("--sizes", "8:64M").split(",")
        for nbytes in doubling(PROGRAM, "--sizes", word)
    ]
    counts = {max(1, nbytes // item_bytes): None for nbytes in sizes}  # in the given order
    calls, warmup = values.get("--iterations"), values.get("--warmup")
    peers = tuple(filter(None, values.get("--vs", "").split(",")))
    return BenchmarkRequest(
        operation=operation,
        ranks=ranks,
        counts=(0,) if operation == "barrier" else tuple(counts),
        dtype=dtype,
        op=_one_of("--op", values.get("--op", "sum"), OPERATORS),
        algorithm=values.get("--algorithm", ""),
        backend=_one_of("--backend", values.get("--backend", "rallypoint"), _BACKENDS),
        rounds=_whole("--rounds", values.get("--rounds", "9")),
        calls=None if calls is None else _whole("--iterations", calls),
        warmup=None if warmup is None else _whole("--warmup", warmup, least=0),
        peers=tuple(_one_of("--vs", peer, PEERS) for peer in peers),
        pin="--pin" in values,
        hosts=hosts,
    )


def environments_named(text: str) -> dict[str, Path]:
    """``"mpich=/path,openmpi=/other"`` -> prefixes by contender."""
    named = {}
    for word in filter(None, text.split(",")):
        name, _, prefix = word.partition("=")
        if name not in PACKAGES or not prefix:
            raise UsageError(
                f"{PROGRAM}: --mpi-env {word} is not NAME=DIR, with one of {', '.join(PACKAGES)}."
            )
        named[name] = Path(prefix).absolute()
    return named


def _hosts(values: Mapping[str, str]) -> tuple[str, ...]:
    hosts = tuple(filter(None, values.get("--hosts", "").split(",")))
    for host in hosts:
        if ":" in host or not is_host_name(host):
            raise UsageError(
                f"{PROGRAM}: --hosts {host} is not a host name; --nproc-per-node gives the number "
                "of ranks on each host."
            )
        if is_loopback(host) and not all(map(is_loopback, hosts)):
            raise UsageError(
                f"{PROGRAM}: --hosts {host} is a name that other hosts cannot resolve; give one "
                "that they can."
            )
        if hosts.count(host) > 1:
            raise UsageError(f"{PROGRAM}: --hosts names {host} twice; name it once.")
    if "--hosts" in values and not hosts:
        raise UsageError(f"{PROGRAM}: --hosts names no host.")
    if "--rsh" in values and not hosts:
        raise UsageError(f"{PROGRAM}: --rsh needs --hosts, which it says how to reach.")
    return hosts


def _whole(flag: str, text: str, least: int = 1) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise UsageError(f"{PROGRAM}: {flag} needs an integer of at least {least}, not {text!r}.")
    return int(text)


def _one_of(flag: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise UsageError(f"{PROGRAM}: {flag} {text} is unknown; it takes {', '.join(known)}.")
    return text
