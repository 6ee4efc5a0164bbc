"""The batch script that `rallypoint script slurm` prints. Pure: flags in, text out."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from rallypoint.cli.nodes import read_nnodes
from rallypoint.cli.numbers import is_whole, seconds
from rallypoint.cli.options import Flag, UsageError

PROGRAM = "rallypoint script slurm"
# Those that differ from node to node, or that say what Slurm says.
_ANSWERED = (
    *("--node-rank", "--local-addr", "--master-addr", "--master-port", "--standalone", "--on"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--hosts", "--hostfile"),
)
_OWN = ("--job-name", "--time", "--gpus-per-node", "--cpus-per-worker", "--nnodes")
_MARGIN_S = 30  # beyond what workers have to end in; Slurm may also signal a minute early


def batch_script(values: Mapping[str, str], command: Sequence[str], flags: Sequence[Flag]) -> str:
    """The text.

    Args:
        values: what was typed, by the names of `flags`.
        command: the user's script and its arguments.

    Raises:
        UsageError: a flag that Slurm answers, or a number that is none.
    """
    for name in _ANSWERED:
        if name in values:
            raise UsageError(f"{PROGRAM}: {name} is what Slurm says of each node; leave it out.")
    if not command:
        raise UsageError(f"{PROGRAM}: no script given; name one, as in: {PROGRAM} train.py")
    fewest, most = read_nnodes(values.get("--nnodes", "1"))
    is_elastic = fewest != most
    gpus = _count(values, "--gpus-per-node", 0)
    cpus = _cpus(values, gpus)
    lines = ["#!/bin/bash", f"# Made by: {_made_by(values, command, flags)}"]
    lines += ["# Add what your cluster asks for (--account, --partition), and give it to sbatch."]
    lines += [f"#SBATCH --job-name={shlex.quote(_job_name(values, command))}"]
    lines += [f"#SBATCH --nodes={fewest}-{most}" if is_elastic else f"#SBATCH --nodes={most}"]
    if is_elastic:
        lines += ["# The job goes on if a node fails.", "#SBATCH --no-kill"]
    lines += ["# One launcher on each node, which starts the workers there."]
    lines += ["#SBATCH --ntasks-per-node=1"]
    if cpus:
        lines += ["# For all workers of a node.", f"#SBATCH --cpus-per-task={cpus}"]
    else:
        lines += ["# Whole nodes, as there are as many workers as CPUs.", "#SBATCH --exclusive"]
    lines += [f"#SBATCH --gpus-per-node={gpus}"] if gpus else []
    lines += [f"#SBATCH --time={shlex.quote(values['--time'])}"] if "--time" in values else []
    lines += [
        "# Before the time limit: so long the workers have to save what they did, and to end.",
        f"#SBATCH --signal=TERM@{_notice_s(values)}",
        "# Started again if it is preempted or a node fails; its output goes on in the same file.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "",
    ]
    if "--token-file" not in values:
        lines += [
            "# Who does not know it is not let in; drawn each time that the job starts.",
            "drawn=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n')",
            "export RALLYPOINT_TOKEN=${RALLYPOINT_TOKEN:-$drawn}",
            "",
        ]
    lines += ["# A launcher that has left (a drained node's) does not end those of other nodes."]
    lines += [_srun(cpus, is_elastic=is_elastic), f"    {_run(values, command, flags)}"]
    return "\n".join([*lines, ""])


def _srun(cpus: int, *, is_elastic: bool) -> str:
    """srun does not take --cpus-per-task over from sbatch, since Slurm 22.05."""
    words = ["srun --ntasks-per-node=1", f"--cpus-per-task={cpus or '$SLURM_CPUS_ON_NODE'}"]
    words += ["--no-kill"] if is_elastic else []
    return " ".join([*words, "--kill-on-bad-exit=0 --wait=0 \\"])


def _run(values: Mapping[str, str], command: Sequence[str], flags: Sequence[Flag]) -> str:
    """`rallypoint run` with what Slurm does not answer."""
    is_elastic = ":" in values.get("--nnodes", "")
    kept = {
        name: value
        for name, value in values.items()
        if name not in _OWN or (name == "--nnodes" and is_elastic)
    }
    return _line("rallypoint run", kept, command, flags)


def _made_by(values: Mapping[str, str], command: Sequence[str], flags: Sequence[Flag]) -> str:
    return _line(PROGRAM, values, command, flags).replace("\n", " ")


def _line(
    program: str, values: Mapping[str, str], command: Sequence[str], flags: Sequence[Flag]
) -> str:
    with_value = {flag.name for flag in flags if flag.takes_value}
    words = []
    for name, value in values.items():
        words += [name, value] if name in with_value else [name]
    return " ".join([program, *map(shlex.quote, [*words, *command])])


def _cpus(values: Mapping[str, str], gpus: int) -> int:
    """Of a node; 0: all."""
    workers = values.get("--nproc-per-node", "1")
    each = _count(values, "--cpus-per-worker", 1)
    if workers in ("gpu", "xpu") and not gpus:
        raise UsageError(
            f"{PROGRAM}: --nproc-per-node {workers} counts what Slurm gives, which is what is asked"
            " for; add --gpus-per-node N."
        )
    if workers in ("gpu", "xpu", "auto") and gpus:
        return gpus * each
    if workers in ("cpu", "auto"):
        return 0
    return _count(values, "--nproc-per-node", 1) * each


def _notice_s(values: Mapping[str, str]) -> int:
    return math.ceil(seconds(values, "--shutdown-timeout", 30.0)) + _MARGIN_S


def _count(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, str(default))
    if not is_whole(text) or (name in values and not int(text)):
        raise UsageError(f"{PROGRAM}: {name} is {text!r}; it must be a whole number from 1 on.")
    return int(text)


def _job_name(values: Mapping[str, str], command: Sequence[str]) -> str:
    """Unless it was given: train, for train.py or my_package.train."""
    name = PurePath(command[0]).name
    short = name.rpartition(".")[2] if "--module" in values else PurePath(name).stem
    return values.get("--job-name") or short or "rallypoint"
