"""`rallypoint script`: prints a script or manifest that runs a job under a scheduler; submits
nothing.

It takes the flags of `rallypoint run`. Those whose values the scheduler decides are refused, some
become the scheduler's own, and the rest are passed on to `rallypoint run` in the script.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.options import HELP, UsageError, describe, parse
from rallypoint.lab.script import jobset, sbatch
from rallypoint.lab.script.script_request import ScriptRequest

_KINDS = {"slurm": sbatch, "jobset": jobset}
_NOT_HERE = (HELP.name, "--print-completion")
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
    program = f"rallypoint script {kind}"
    try:
        if kind not in _KINDS:
            raise UsageError(
                f"rallypoint script: {kind!r} is not a kind of script; use"
                f" {' or '.join(_KINDS)}, as in rallypoint script slurm --nnodes 2 train.py"
            )
        module = _KINDS[kind]
        own = (*module.FLAGS, HELP)
        flags = (*own, *(flag for flag in FLAGS if flag.name not in _NOT_HERE))
        values, command = parse(rest, flags, program=program, environ={})
        if "--help" in values:
            print(module.USAGE, describe(own), _MORE, sep="\n")
            return 0
        request = ScriptRequest(
            program=program, scheduler=module.ANSWERS, flags=flags, values=values, command=command
        )
        request.check()
        print(module.text_of(request), end="")
    except (UsageError, InvalidArgumentError) as error:
        print(str(error).replace("rallypoint run: ", f"{program}: ", 1), file=sys.stderr)
        return 2
    return 0
