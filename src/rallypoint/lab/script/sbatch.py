"""A batch script for Slurm. Pure: a request in, text out."""

from __future__ import annotations

import shlex

from rallypoint.cli.options import Flag, text
from rallypoint.lab.script import COMMON, ScriptOptions

USAGE = """\
usage: rallypoint script slurm [FLAGS] SCRIPT [ARGUMENTS...]

Print a batch script for Slurm that runs SCRIPT on several nodes, with comments that say what each
line is for. It submits nothing: read it, add what your cluster requires (--account, --partition),
and pass it to sbatch.

Four nodes with a worker for each of their eight GPUs:
  rallypoint script slurm --nnodes 4 --gpus-per-node 8 --cpus-per-worker 12 --time 12:00:00 \\
      train.py --epochs 90 > job.sh
  sbatch job.sh

At least two nodes and up to eight, as Slurm has them; the job continues without those that fail:
  rallypoint script slurm --nnodes 2:8 --nproc-per-node 8 train.py > job.sh
"""
ANSWERS = "set by Slurm for each node"
OWN = (*COMMON, "--time")
_MARGIN_S = 30  # beyond the time that workers have to end; Slurm may also signal a minute early


class SbatchOptions(ScriptOptions):
    """The flags for Slurm."""

    time = Flag("time limit, as in 12:00:00 (default: the partition's)", "TIME", text, None)


def text_of(options: SbatchOptions) -> str:
    """The batch script."""
    (fewest, most), cpus = options.nnodes, options.cpus
    lines = ["#!/bin/bash", options.made_by]
    lines += ["# Add what your cluster requires (--account, --partition), and pass it to sbatch."]
    lines += [f"#SBATCH --job-name={shlex.quote(options.name)}"]
    if options.is_elastic:
        lines += [f"#SBATCH --nodes={fewest}-{most}"]
        lines += ["# The job continues if a node fails.", "#SBATCH --no-kill"]
    else:
        lines += [f"#SBATCH --nodes={most}"]
    lines += ["# One launcher on each node, which starts the workers there."]
    lines += ["#SBATCH --ntasks-per-node=1"]
    if cpus:
        lines += ["# For all workers of a node.", f"#SBATCH --cpus-per-task={cpus}"]
    else:
        lines += ["# Whole nodes, as there are as many workers as CPUs.", "#SBATCH --exclusive"]
    lines += [f"#SBATCH --gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []
    lines += [f"#SBATCH --time={shlex.quote(options.time)}"] if options.time is not None else []
    lines += [
        "# Sent before the time limit: the workers have this long to save their work and end.",
        f"#SBATCH --signal=TERM@{options.shutdown_s + _MARGIN_S}",
        "# Restarted if it is preempted or a node fails; its output continues in the same file.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "",
    ]
    if options.token_file is None:
        lines += [
            "# Only nodes that know this token can join; a new one is drawn at each start of the "
            "job.",
            "drawn=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n')",
            "export RALLYPOINT_TOKEN=${RALLYPOINT_TOKEN:-$drawn}",
            "",
        ]
    # Slurm says how many nodes there are, not that fewer would do.
    own = {*OWN} | (set() if options.is_elastic else {"--nnodes"})
    lines += ["# When one launcher exits (on a drained node), those of other nodes keep running."]
    lines += [
        _srun(cpus, is_elastic=options.is_elastic),
        f"    {shlex.join(options.run(without=own))}",
    ]
    return "\n".join([*lines, ""])


def _srun(cpus: int, *, is_elastic: bool) -> str:
    """The srun command with --cpus-per-task, which srun has not inherited from sbatch since Slurm
    22.05.
    """
    words = ["srun --ntasks-per-node=1", f"--cpus-per-task={cpus or '$SLURM_CPUS_ON_NODE'}"]
    words += ["--no-kill"] if is_elastic else []
    return " ".join([*words, "--kill-on-bad-exit=0 --wait=0 \\"])
