"""Derives from the flags of `rallypoint run --hosts`, or --on ray, what each launcher is given: the
hosts that --hosts and --hostfile name, and the words after `rallypoint run` on each.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from rallypoint.base.address import is_loopback
from rallypoint.base.port_range import VARIABLE as PORT_RANGE
from rallypoint.base.record import Record
from rallypoint.cli.flags import (
    PROGRAM,
    HostOptions,
    JobOptions,
    RayOptions,
    RunOptions,
    read_nnodes,
    read_token,
)
from rallypoint.cli.options import UsageError, is_whole
from rallypoint.cli.read_job import new_run_id, read_job
from rallypoint.cluster.remote_shell import SSH, forwarded, is_host_name
from rallypoint.launch.job import LOCAL_RANK_MACRO, TOKEN, Job
from rallypoint.rendezvous.timeouts import read_timeouts

# Variables that users set here and mean for all hosts.
FORWARDED = ("RALLYPOINT_", "OMP_", "MKL_", "KMP_", "NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_",
             "HIP_", "PYTHON", "TORCH")  # fmt: skip
MEETING = ("--standalone", "--on", "--node-rank", "--master-addr", "--master-port", "--local-addr",
            "--rdzv-backend", "--rdzv-endpoint")  # fmt: skip
# Flags that each launcher gets in another way.
_OWN = (*HostOptions.flags, *RayOptions.flags, "--on", "--nnodes", "--nproc-per-node", "--rdzv-id",
        "--token-file", "--dry-run")  # fmt: skip
_COUNTED_THERE = ("auto", "cpu", "gpu", "xpu")


class RemoteHost(Record):
    """One host: its name for ssh, perhaps with `user@`; its --nproc-per-node, if it has one."""

    name: str
    workers: str = ""

    @property
    def address(self) -> str:
        """The address by which the others know it."""
        return self.name.rpartition("@")[2]


class Plan(Record, kw_only=True, secret=("environ",)):
    """What to start on the hosts.

    Attributes:
        hosts: the hosts by node rank; empty if they are found while the job runs.
        fewest, most: the number of hosts that the job needs, and may have.
        workers: --nproc-per-node for hosts that specify nothing else.
        environ: variables that all launchers get, including the token.
        job: the job as a launcher on this machine would read it from the flags.
    """

    hosts: tuple[RemoteHost, ...]
    fewest: int
    most: int
    rsh: Sequence[str]
    workers: str
    options: RunOptions
    command: Sequence[str]
    run_id: str
    environ: Mapping[str, str]
    job: Job

    @property
    def port_range(self) -> str:
        """The ports for all launchers, as in --port-range."""
        return self.options.texts.get("--port-range", self.environ.get(PORT_RANGE, ""))

    @property
    def script(self) -> str:
        """The file that all hosts must have; empty if there is none, or it is unknown here."""
        script = self.command[0]
        is_other = self.options.module or LOCAL_RANK_MACRO in script
        return "" if is_other or (self.options.no_python and "/" not in script) else script

    def words(self, number: int, endpoints: Sequence[str]) -> list[str]:
        """The arguments of the launcher on that host, after `rallypoint run`."""
        workers = (self.hosts[number].workers if self.hosts else "") or self.workers
        words = _meeting(self.fewest, self.most, self.run_id, endpoints)
        if number < self.most > 1:  # the others are spares, without a rank
            words["--node-rank"] = str(number)
        if workers:
            words["--nproc-per-node"] = workers
        own = [f"{name}={text}" for name, text in words.items()]
        return [*own, *self.options.words(without=_OWN), "--", *self.command]


def read_plan(options: RunOptions, command: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Read the flags; what would be wrong on every host is refused here."""
    refuse(MEETING, options, "--hosts")
    hosts = read_hosts(options)
    workers = options.texts.get("--nproc-per-node", "")
    nnodes = _read_nnodes(options, len(hosts))
    return make_plan(options, command, environ, hosts=hosts, nnodes=nnodes, workers=workers)


def refuse(names: Sequence[str], options: JobOptions, by: str) -> None:
    """Refuse flags about what the flag `by` already specifies."""
    for name in names:
        if name in options:
            raise UsageError(
                f"{by} already determines the machines and the endpoint; leave out {name}."
            )


def make_plan(
    options: RunOptions,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    hosts: tuple[RemoteHost, ...],
    nnodes: tuple[int, int],
    workers: str,
) -> Plan:
    """The plan for these hosts; `nnodes` is the minimum and maximum number of nodes."""
    if command[:1] == ["-"] and not options.module and not options.no_python:
        raise UsageError(
            "'-' is standard input, which other hosts cannot read; save the script in a file."
        )
    fewest, most = nnodes
    run_id = options.rdzv_id or new_run_id()
    environ = _with_token(options, environ)
    kept = {name: text for name, text in options.texts.items() if name not in _OWN}
    checked = {**kept, **_meeting(fewest, most, run_id, ("localhost:1",))}
    checked.pop("--numa-binding", None)  # it depends on each machine's CPUs
    if workers and workers not in _COUNTED_THERE:
        checked["--nproc-per-node"] = workers
    job, _ = read_job(options.__replace__(texts=checked), command, environ)
    if job.rendezvous is not None:
        read_timeouts(job.rendezvous.configuration, job.rendezvous.backend)
    return Plan(
        hosts=hosts,
        fewest=fewest,
        most=most,
        rsh=options.rsh or SSH,
        workers=workers,
        options=options,
        command=command,
        run_id=run_id,
        environ={**forwarded(environ, FORWARDED), **named_variables(options, environ)},
        job=job,
    )


def _meeting(fewest: int, most: int, run_id: str, endpoints: Sequence[str]) -> dict[str, str]:
    """The flags for the launchers' rendezvous; none for a single one."""
    if most == 1:
        return {"--nnodes": "1", "--rdzv-id": run_id}
    return {
        "--nnodes": f"{fewest}:{most}" if fewest < most else str(most),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": ",".join(endpoints),
        "--rdzv-id": run_id,
    }


def _read_nnodes(options: JobOptions, hosts: int) -> tuple[int, int]:
    """The minimum and maximum number of nodes: all hosts by default; ``"2:"`` sets no maximum."""
    text = options.texts.get("--nnodes", str(hosts))
    fewest, most = read_nnodes(f"{text}{hosts}" if text.endswith(":") else text, "--nnodes")
    if most > hosts:
        raise UsageError(
            f"--nnodes is {text}, which is more than the number of hosts, {hosts}; name more hosts,"
            " or ask for fewer nodes."
        )
    if most == 1 < hosts:
        raise UsageError(
            f"--nnodes is {text}, but there are {hosts} hosts; name one, or let more take part."
        )
    return fewest, most


def _with_token(options: JobOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the user's token, or a new one: jobs on a network always have one."""
    token = read_token(options.token_file, environ)
    return {**environ, TOKEN: secrets.token_hex(16) if token is None else os.fsdecode(token)}


def named_variables(options: JobOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that --env names."""
    names = [name.strip() for name in options.env.split(",")]
    for name in filter(None, names):
        if name not in environ:
            raise UsageError(
                f"--env {name}: this variable is not set here; set it, as in"
                f" {name.partition('=')[0]}=... {PROGRAM} ..."
            )
    return {name: environ[name] for name in names if name}


def read_hosts(options: JobOptions) -> tuple[RemoteHost, ...]:
    """The hosts, by node rank."""
    if "--hosts" in options and "--hostfile" in options:
        raise UsageError("--hosts and --hostfile both name the hosts; give one.")
    if "--hostfile" in options:
        source = f"--hostfile {options.hostfile}"
        hosts = _read_file(options.hostfile)
    else:
        source = "--hosts"
        words = [word.strip() for word in options.hosts.split(",")]
        hosts = [_read_host(word, source) for word in words if word]
    if not hosts:
        raise UsageError(f"{source} names no host.")
    addresses = [host.address for host in hosts]
    for address in addresses:
        if addresses.count(address) > 1:
            raise UsageError(
                f"{source} names {address} twice; name it once with its number of "
                f"workers, as in {address}:8."
            )
        if is_loopback(address) and not all(map(is_loopback, addresses)):
            raise UsageError(
                f"{source}: other hosts cannot reach this one as {address}; give a "
                "name or address that they can resolve."
            )
    return tuple(hosts)


def _read_host(text: str, source: str) -> RemoteHost:
    """Parse ``"USER@HOST:N"``, whose parts but HOST may be missing; IPv6 with N needs brackets."""
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
            f"{source}: {text!r} is not a host; write HOST, HOST:N or USER@HOST:N, "
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
            f"--hostfile {path} cannot be read ({error.strerror}); check its path."
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
                f"{source}: {word!r} is not understood; a line is HOST, HOST:N or HOST slots=N."
            )
        host = RemoteHost(host.name, text)
    return host
