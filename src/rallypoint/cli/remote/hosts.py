"""The hosts that --hosts and --hostfile name, and the number of workers on each."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.address import is_loopback
from rallypoint.base.record import Record
from rallypoint.cli.number_flags import is_whole
from rallypoint.cli.options import UsageError
from rallypoint.cluster.remote_shell import is_host_name

PROGRAM = "rallypoint run"


class RemoteHost(Record):
    """One host.

    Attributes:
        name: the name for ssh; may begin with `user@`.
        workers: as for --nproc-per-node; empty if that flag applies.
    """

    name: str
    workers: str = ""

    @property
    def address(self) -> str:
        """The address by which the others know it."""
        return self.name.rpartition("@")[2]


def read_hosts(values: Mapping[str, str]) -> tuple[RemoteHost, ...]:
    """The hosts, by node rank.

    Raises:
        UsageError: no host is given, or an invalid one.
    """
    if "--hosts" in values and "--hostfile" in values:
        raise UsageError(f"{PROGRAM}: --hosts and --hostfile both name the hosts; give one.")
    if "--hostfile" in values:
        source = f"--hostfile {values['--hostfile']}"
        hosts = _read_file(values["--hostfile"])
    else:
        source = "--hosts"
        words = [word.strip() for word in values["--hosts"].split(",")]
        hosts = [_read_host(word, source) for word in words if word]
    if not hosts:
        raise UsageError(f"{PROGRAM}: {source} names no host.")
    addresses = [host.address for host in hosts]
    for address in addresses:
        if addresses.count(address) > 1:
            raise UsageError(
                f"{PROGRAM}: {source} names {address} twice; name it once with its number of "
                f"workers, as in {address}:8."
            )
        if is_loopback(address) and not all(map(is_loopback, addresses)):
            raise UsageError(
                f"{PROGRAM}: {source}: other hosts cannot reach this one as {address}; give a "
                "name or address that they can resolve."
            )
    return tuple(hosts)


def _read_host(text: str, source: str) -> RemoteHost:
    """Parse ``"HOST"``, ``"HOST:N"`` or ``"USER@HOST:N"``; an IPv6 address followed by N needs
    brackets.
    """
    user, at, rest = text.rpartition("@")
    if rest.startswith("["):
        address, _, tail = rest[1:].partition("]")
        is_whole_word = not tail or tail.startswith(":")
        colon, workers = tail[:1], tail[1:]
    elif rest.count(":") > 1:
        address, colon, workers, is_whole_word = rest, "", "", True
    else:
        address, colon, workers = rest.partition(":")
        is_whole_word = True
    is_count = not colon or (is_whole(workers) and int(workers) > 0)
    if not is_host_name(f"{user}{at}{address}") or not is_count or not is_whole_word:
        raise UsageError(
            f"{PROGRAM}: {source}: {text!r} is not a host; write HOST, HOST:N or USER@HOST:N, "
            "where N is the number of its workers."
        )
    return RemoteHost(f"{user}{at}{address}", workers)


def _read_file(path: str) -> list[RemoteHost]:
    """Parse a host file of Open MPI or DeepSpeed (``HOST slots=N``), or of MPICH (``HOST:N``)."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UsageError(
            f"{PROGRAM}: --hostfile {path} cannot be read ({error.strerror}); check its path."
        ) from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_read_line(words, f"--hostfile {path}, line {number}"))
    return hosts


def _read_line(words: list[str], source: str) -> RemoteHost:
    host = _read_host(words[0], source)
    for word in words[1:]:
        name, equals, text = word.partition("=")
        if name in ("max_slots", "max-slots") and equals:
            continue  # how far Open MPI may go beyond `slots`
        is_slots = name == "slots" and is_whole(text) and int(text) > 0
        if not is_slots or host.workers:
            raise UsageError(
                f"{PROGRAM}: {source}: {word!r} is not understood; a line is HOST, HOST:N or HOST"
                " slots=N."
            )
        host = RemoteHost(host.name, text)
    return host
