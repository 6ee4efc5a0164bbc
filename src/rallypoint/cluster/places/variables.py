"""What a place says about this node: each value with the variable that it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record

PORT = 29400  # where nodes meet, if the place names none
_FIRST_PORT, _PORTS = 20000, 12768  # below the ports that the kernel assigns to connections
_FAR = 1597
MOST_ENDPOINTS = 3  # so that the job can start, and continue, without one of them


class HostFacts(Record):
    """What is known of this machine without variables: its name, and the text of its /etc/hosts."""

    name: str
    table: str = ""


class Reading(Record, kw_only=True):
    """What is known of this node.

    Attributes:
        place: its name, as in "Slurm step 12.0".
        by: the variable by which it was recognised.
        node_rank, nodes: this node's rank, and the number of nodes; None if unknown.
        endpoints: where the nodes meet, as HOST:PORT, in the order to be tried.
        run_id: the job's name there.
        sources: the variables for "node rank", "nodes", "meeting at" and "job's name".
        wrong: why a job of several nodes cannot start, and what to do; empty if it can.
        note: what a user should know when running on this node alone.
    """

    place: str
    by: str
    node_rank: int = 0
    nodes: int | None = 1
    endpoints: tuple[str, ...] = ()
    run_id: str = ""
    sources: Mapping[str, str] = MappingProxyType({})
    wrong: str = ""
    note: str = ""


def whole(environ: Mapping[str, str], name: str, *, least: int = 0) -> int:
    """The value of a variable as a whole number."""
    text = environ.get(name, "")
    if not text:
        raise InvalidArgumentError(
            f"{name} is not set, although related variables are; --on here ignores them."
        )
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise InvalidArgumentError(
            f"{name} is {text!r} in the environment; it must be an integer of at least {least}."
            " --on here ignores it."
        )
    return int(text)


def optional(environ: Mapping[str, str], name: str, *, least: int = 0) -> int | None:
    """As `whole`; None if the variable is not set."""
    return whole(environ, name, least=least) if environ.get(name) else None


def numbered(
    place: str,
    environ: Mapping[str, str],
    *,
    rank: str,
    hosts: Sequence[str],
    hosts_by: str,
    run_id: str = "",
    run_id_by: str = "",
    port: int = PORT,
) -> Reading:
    """The node in a list of hosts whose number is in the variable `rank`."""
    node_rank = whole(environ, rank)
    if node_rank >= len(hosts):
        raise InvalidArgumentError(
            f"{rank} is {node_rank}, but {hosts_by} has {len(hosts)} hosts; --on here ignores both."
        )
    sources = {"node rank": rank, "nodes": hosts_by, "meeting at": hosts_by}
    return Reading(
        place=place,
        by=rank,
        node_rank=node_rank,
        nodes=len(hosts),
        endpoints=tuple(f"{_bracketed(host)}:{port}" for host in hosts[:MOST_ENDPOINTS]),
        run_id=run_id,
        sources={**sources, "job's name": run_id_by} if run_id else sources,
    )


def derived_port(job: str, step: int, attempt: int = 0, *, choice: int = 0) -> int:
    """A port for a step of a job, on machines that others use, too.

    The steps of an attempt have different ports, and a restarted job does not meet what may be left
    of its previous attempt.

    Args:
        choice: selects another port if the first is taken; far from those of the next steps.
    """
    from zlib import crc32

    text = f"{job} {attempt}" if attempt else job
    return _FIRST_PORT + (crc32(text.encode()) + step + choice * _FAR) % _PORTS


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
