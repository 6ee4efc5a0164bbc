"""`rallypoint script`: prints what a scheduler is to be given for a job, and submits nothing.

It takes the flags of `rallypoint run`. Those that are the scheduler's to answer are refused, some
become its own, and the rest goes on to `rallypoint run` in the script.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.options import HELP, Flag, UsageError, describe, parse

PROGRAM = "rallypoint script slurm"
OWN = (
    Flag("--job-name", "what squeue calls it (default: SCRIPT's name)", "NAME"),
    Flag("--time", "its time limit, as in 12:00:00 (default: the partition's)", "TIME"),
    Flag("--gpus-per-node", "ask for so many GPUs on each node", "N"),
    Flag("--cpus-per-worker", "ask for so many CPUs for each worker (default 1)", "N"),
    HELP,
)
_NOT_HERE = (HELP.name, "--print-completion")
_USAGE = f"""\
usage: {PROGRAM} [FLAGS] SCRIPT [ARGUMENTS...]

Print a batch script for Slurm that runs SCRIPT on several nodes, with comments that say what each
line is for. It submits nothing: read it, add what your cluster asks for (--account, --partition),
and give it to sbatch.

Four nodes with a worker for each of their eight GPUs:
  {PROGRAM} --nnodes 4 --nproc-per-node 8 --gpus-per-node 8 --cpus-per-worker 12 \\
      --time 12:00:00 train.py --epochs 90 > job.sh
  sbatch job.sh

Two nodes at least, and up to eight, as Slurm has them; the job goes on without those that fail:
  {PROGRAM} --nnodes 2:8 --nproc-per-node 8 train.py > job.sh
"""
_MORE = """
and the flags of `rallypoint run` (see rallypoint run --help), which go on into the script, but for
those that Slurm answers: --node-rank, --rdzv-endpoint and the like."""


def script(words: Sequence[str]) -> int:
    """Perform `rallypoint script WORDS`; the exit status."""
    kind, rest = (words[0], words[1:]) if words else ("", ())
    if kind in ("", "--help", "-h"):
        print(_USAGE, describe(OWN), _MORE, sep="\n")
        return 0 if kind else 2
    flags = (*OWN, *(flag for flag in FLAGS if flag.name not in _NOT_HERE))
    try:
        if kind != "slurm":
            raise UsageError(
                f"rallypoint script: {kind!r} is no kind of script; there is slurm, as in"
                f" {PROGRAM} --nnodes 2 train.py"
            )
        values, command = parse(rest, flags, program=PROGRAM, environ={})
        if "--help" in values:
            print(_USAGE, describe(OWN), _MORE, sep="\n")
            return 0
        from rallypoint.cli.slurm_script import batch_script

        print(batch_script(values, command, flags), end="")
    except (UsageError, InvalidArgumentError) as error:
        text = str(error).replace("rallypoint run: ", f"{PROGRAM}: ", 1)
        print(text, file=sys.stderr)
        return 2
    return 0
