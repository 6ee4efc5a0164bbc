"""`rallypoint script`: prints a script or manifest that runs a job under a scheduler; submits
nothing.

It takes the flags of `rallypoint run`. Those whose values the scheduler decides are refused, some
become the scheduler's own, and the rest are passed on to `rallypoint run` in the script.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cli.options import FlagGroup, run_command
from rallypoint.lab.script import jobset, sbatch
from rallypoint.lab.script.script_request import ScriptOptions, ScriptRequest

_KINDS: Mapping[str, tuple[Any, type[ScriptOptions]]] = {
    "slurm": (sbatch, sbatch.SbatchOptions),
    "jobset": (jobset, jobset.JobsetOptions),
}
_USAGE = """\
usage: rallypoint script KIND [FLAGS] SCRIPT [ARGUMENTS...]

Print a batch script or manifest for a scheduler, with comments that say what each part is for. It
submits nothing.

  rallypoint script slurm     a batch script for Slurm
  rallypoint script jobset    a manifest for Kubernetes with the JobSet controller

Each has a --help of its own."""
_MORE = """
and the flags of `rallypoint run` (see rallypoint run --help), which are copied into the script,
except for those that the scheduler answers, such as --node-rank and --rdzv-endpoint."""


def script(words: Sequence[str]) -> int:
    """Run `rallypoint script WORDS`; returns the exit status."""
    kind, rest = (words[0], words[1:]) if words else ("", ())
    if kind in ("", "--help", "-h"):
        print(_USAGE)
        return 0 if kind else 2
    if kind not in _KINDS:
        print(
            f"rallypoint script: {kind!r} is not a kind of script; use"
            f" {' or '.join(_KINDS)}, as in rallypoint script slurm --nnodes 2 train.py",
            file=sys.stderr,
        )
        return 2
    program, (module, table) = f"rallypoint script {kind}", _KINDS[kind]

    def act(options: ScriptOptions, command: list[str]) -> int:
        request = ScriptRequest(
            program=program, scheduler=module.ANSWERS, options=options, command=command
        )
        request.check()
        print(module.text_of(request, options), end="")
        return 0

    return run_command(
        program,
        rest,
        table,
        act,
        usage=module.USAGE,
        groups=[FlagGroup("", tuple(table.flags[name] for name in (*module.OWN, "--help")))],
        ending=_MORE,
        statuses=((InvalidArgumentError, 2),),
    )
