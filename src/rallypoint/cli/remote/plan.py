"""Derives from the flags of `rallypoint run --hosts`, or --on ray, what each launcher is given."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.port_range import VARIABLE as PORT_RANGE
from rallypoint.base.record import Record
from rallypoint.cli.flags import FLAGS, HOSTS, RAY
from rallypoint.cli.nodes import new_run_id, read_nnodes
from rallypoint.cli.options import Flag, UsageError
from rallypoint.cli.remote.hosts import RemoteHost, read_hosts
from rallypoint.cli.token_flag import TOKEN_FLAG, VARIABLE, read_token
from rallypoint.cluster.remote_shell import SSH, forwarded
from rallypoint.launch.job import LOCAL_RANK_MACRO, Job
from rallypoint.rendezvous.timeouts import read_timeouts

PROGRAM = "rallypoint run"
JobReader = Callable[
    [Mapping[str, str], Sequence[str], Mapping[str, str]], tuple[Job, list[str]]
]  # as run.py: read_job
# Variables that users set here and mean for all hosts.
FORWARDED = ("RALLYPOINT_", "OMP_", "MKL_", "KMP_", "NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_",
             "HIP_", "PYTHON", "TORCH")  # fmt: skip
MEETING = ("--standalone", "--on", "--node-rank", "--master-addr", "--master-port", "--local-addr",
            "--rdzv-backend", "--rdzv-endpoint")  # fmt: skip
# Flags that each launcher gets in another way.
_OWN = (*(flag.name for flag in (*HOSTS, *RAY)), "--on", "--nnodes", "--nproc-per-node",
        "--rdzv-id", TOKEN_FLAG.name)  # fmt: skip
_COUNTED_THERE = ("auto", "cpu", "gpu", "xpu")


class Plan(Record, kw_only=True, secret=("environ",)):
    """What to start on the hosts.

    Attributes:
        hosts: the hosts by node rank; empty if they are found while the job runs.
        fewest, most: the number of hosts that the job needs, and may have.
        rsh: the command that starts another on a host.
        workers: --nproc-per-node for hosts that specify nothing else.
        flags: the flags that all launchers get.
        command: the script and its arguments.
        script: the script's path, if it is a file; otherwise empty.
        run_id: the job's name.
        environ: variables that all launchers get, including the token.
        port_range: as in --port-range.
        job: the job as a launcher on this machine would read it from the flags.
    """

    hosts: tuple[RemoteHost, ...]
    fewest: int
    most: int
    rsh: tuple[str, ...]
    workers: str
    flags: tuple[str, ...]
    command: tuple[str, ...]
    script: str
    run_id: str
    environ: Mapping[str, str]
    port_range: str
    job: Job

    def words(self, number: int, endpoints: Sequence[str]) -> list[str]:
        """The arguments of the launcher on that host, after `rallypoint run`."""
        workers = (self.hosts[number].workers if self.hosts else "") or self.workers
        meeting = _meeting(self.fewest, self.most, self.run_id, endpoints)
        if number < self.most > 1:  # the others are spares, without a rank of their own
            meeting["--node-rank"] = str(number)
        told = {**meeting, **({"--nproc-per-node": workers} if workers else {})}
        own = [f"{name}={text}" for name, text in told.items()]
        return [*own, *self.flags, "--", *self.command]


def read_plan(
    values: Mapping[str, str],
    command: Sequence[str],
    environ: Mapping[str, str],
    flags: Sequence[Flag] = FLAGS,
    *,
    read: JobReader,
) -> Plan:
    """Read the flags; what would be wrong on every host is refused here.

    Raises:
        UsageError, InvalidArgumentError: the flags are invalid.
    """
    refuse(MEETING, values, "--hosts")
    hosts = read_hosts(values)
    fewest, most = _read_nnodes(values, len(hosts))
    workers = values.get("--nproc-per-node", "")
    return make_plan(
        values,
        command,
        environ,
        flags,
        read=read,
        hosts=hosts,
        nnodes=(fewest, most),
        workers=workers,
    )


def refuse(names: Sequence[str], values: Mapping[str, str], by: str) -> None:
    """Refuse flags about what the flag `by` already specifies."""
    for name in names:
        if name in values:
            raise UsageError(
                f"{PROGRAM}: {by} already says which machines take part and where they meet; "
                f"leave out {name}."
            )


def make_plan(
    values: Mapping[str, str],
    command: Sequence[str],
    environ: Mapping[str, str],
    flags: Sequence[Flag],
    *,
    read: JobReader,
    hosts: tuple[RemoteHost, ...],
    nnodes: tuple[int, int],
    workers: str,
) -> Plan:
    """The plan for these hosts; `nnodes` is the minimum and maximum number of nodes.

    Raises:
        UsageError, InvalidArgumentError: the flags are invalid.
    """
    if command[:1] == ["-"] and not {"--module", "--no-python"} & values.keys():
        raise UsageError(
            f"{PROGRAM}: '-' is standard input, which other hosts cannot read; save the script in "
            "a file."
        )
    fewest, most = nnodes
    run_id = values.get("--rdzv-id") or new_run_id()
    environ = _with_token(values, environ)
    kept = {name: text for name, text in values.items() if name not in _OWN}
    checked = {**kept, **_meeting(fewest, most, run_id, ("localhost:1",))}
    checked.pop("--numa-binding", None)  # it depends on each machine's CPUs
    if workers and workers not in _COUNTED_THERE:
        checked["--nproc-per-node"] = workers
    job, _ = read(checked, command, environ)
    if job.rendezvous is not None:
        read_timeouts(job.rendezvous.configuration, job.rendezvous.backend)
    return Plan(
        hosts=hosts,
        fewest=fewest,
        most=most,
        rsh=read_rsh(values),
        workers=workers,
        flags=tuple(_as_word(flag, kept[flag.name]) for flag in flags if flag.name in kept),
        command=tuple(command),
        script=_script(values, command),
        run_id=run_id,
        environ={**forwarded(environ, FORWARDED), **named_variables(values, environ)},
        port_range=values.get("--port-range", environ.get(PORT_RANGE, "")),
        job=job,
    )


def _script(values: Mapping[str, str], command: Sequence[str]) -> str:
    """The file that all hosts must have; empty if there is none, or it is unknown here."""
    is_other = "--module" in values or LOCAL_RANK_MACRO in command[0]
    is_in_path = "--no-python" in values and "/" not in command[0]
    return "" if is_other or is_in_path else command[0]


def _meeting(fewest: int, most: int, run_id: str, endpoints: Sequence[str]) -> dict[str, str]:
    """The flags by which launchers meet; none for a single one."""
    if most == 1:
        return {"--nnodes": "1", "--rdzv-id": run_id}
    return {
        "--nnodes": f"{fewest}:{most}" if fewest < most else str(most),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": ",".join(endpoints),
        "--rdzv-id": run_id,
    }


def _read_nnodes(values: Mapping[str, str], hosts: int) -> tuple[int, int]:
    """The minimum and maximum number of nodes: all hosts by default; ``"2:"`` sets no maximum."""
    text = values.get("--nnodes", str(hosts))
    fewest, most = read_nnodes(f"{text}{hosts}" if text.endswith(":") else text)
    if most > hosts:
        raise UsageError(
            f"{PROGRAM}: --nnodes is {text}, which is more than the number of hosts, {hosts}; name"
            " more hosts, or ask for fewer nodes."
        )
    if most == 1 < hosts:
        raise UsageError(
            f"{PROGRAM}: --nnodes is {text}, but there are {hosts} hosts; name one, or let more"
            " take part."
        )
    return fewest, most


def _with_token(values: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the user's token, or a new one: jobs on a network always have one."""
    token = read_token(values, environ)
    return {**environ, VARIABLE: secrets.token_hex(16) if token is None else os.fsdecode(token)}


def read_rsh(values: Mapping[str, str]) -> tuple[str, ...]:
    """The command that starts another on a host.

    Raises:
        UsageError: --rsh is not a command.
    """
    if "--rsh" not in values:
        return SSH
    try:
        words = tuple(shlex.split(values["--rsh"]))
    except ValueError as error:
        raise UsageError(f"{PROGRAM}: --rsh {values['--rsh']}: {error}.") from None
    if not words:
        raise UsageError(f"{PROGRAM}: --rsh is empty; give a command, or leave it out for ssh.")
    return words


def named_variables(values: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that --env names.

    Raises:
        UsageError: one of them is not set.
    """
    names = [name.strip() for name in values.get("--env", "").split(",")]
    for name in filter(None, names):
        if name not in environ:
            raise UsageError(
                f"{PROGRAM}: --env {name}: this variable is not set here; set it, as in"
                f" {name.partition('=')[0]}=... {PROGRAM} ..."
            )
    return {name: environ[name] for name in names if name}


def _as_word(flag: Flag, text: str) -> str:
    return f"{flag.name}={text}" if flag.takes_value else flag.name
