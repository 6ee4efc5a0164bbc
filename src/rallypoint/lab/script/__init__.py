"""`rallypoint script`: prints a script or manifest that runs a job under a scheduler; submits
nothing.

It takes the flags of `rallypoint run`. Those whose values the scheduler decides are refused, some
become the scheduler's own, and the rest are passed on to `rallypoint run` in the script.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.wording import one_line
from rallypoint.base.worker_env import SHUTDOWN_TIMEOUT_S
from rallypoint.cli.flags import JobOptions
from rallypoint.cli.options import HELP, Flag, FlagGroup, UsageError, integer, perform, reader, text

_USAGE = """\
usage: rallypoint script KIND [FLAGS] SCRIPT [ARGUMENTS...]

Print a batch script or manifest for a scheduler, with comments that say what each part is for. It
submits nothing.

  rallypoint script slurm     a batch script for Slurm
  rallypoint script jobset    a manifest for Kubernetes with the JobSet controller

Each has its own --help."""
_MORE = """
and the flags of `rallypoint run` (see rallypoint run --help-all), which are copied into the
script, except for those that the scheduler answers, such as --node-rank and --rdzv-endpoint."""
# Flags that differ from node to node, or whose values the scheduler provides.
_ANSWERED = (
    *("--node-rank", "--local-addr", "--master-addr", "--master-port", "--standalone", "--on"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--hosts", "--hostfile"),
)
_count = reader(
    lambda text: integer(text, 1), "{name} is {text!r}; it must be an integer of at least 1."
)
# Those that become the scheduler's own.
COMMON = ("--job-name", "--gpus-per-node", "--cpus-per-worker")


class ScriptOptions(JobOptions):
    """One command line for any scheduler: the flags of `rallypoint run`, and further ones.

    Attributes:
        program: the command's name, for errors.
        command: the user's script and its arguments.
    """

    program: str = ""
    command: Sequence[str] = ()

    job_name = Flag("the job's name in the scheduler (default: SCRIPT's name)", "NAME", text, None)
    gpus_per_node = Flag(
        "number of GPUs to request on each node, and of workers unless\n--nproc-per-node is given",
        "N",
        _count,
        0,
    )
    cpus_per_worker = Flag("number of CPUs to request for each worker (default 1)", "N",
                           _count, 1)  # fmt: skip
    help = HELP

    def check(self, scheduler: str) -> None:
        """Check that there is a script, and no flag whose value the scheduler decides.

        `scheduler`: what decides it, e.g. "set by Slurm for each node".
        """
        for name in _ANSWERED:
            if name in self:
                raise UsageError(f"{name} is {scheduler}; leave it out.")
        for name, value in self.texts.items():
            if not value.isprintable():
                raise UsageError(
                    f"{name} is {value!r}; leave out what is not printable, as it"
                    " could end a line of the script."
                )
        if not self.command:
            raise UsageError(f"no script given; name one, as in: {self.program} train.py")

    @property
    def is_elastic(self) -> bool:
        """Whether the job continues with fewer nodes than the maximum."""
        fewest, most = self.nnodes
        return fewest != most

    @property
    def name(self) -> str:
        """The job's name; by default train, for train.py or my_package.train."""
        script = PurePath(self.command[0])
        short = script.name.rpartition(".")[2] if self.module else script.stem
        usual = "".join(each if each.isprintable() else "_" for each in short)
        return self.job_name or usual or "rallypoint"

    @property
    def cpus(self) -> int:
        """The CPUs of each node; 0: as many workers as CPUs."""
        workers, gpus = self.nproc_per_node, self.gpus_per_node
        each = self.cpus_per_worker
        if workers in ("gpu", "xpu") and not gpus:
            raise UsageError(
                f"--nproc-per-node {workers} counts the devices of a node, so the script must"
                " request some; add --gpus-per-node N."
            )
        if workers in ("gpu", "xpu", "auto") and gpus:
            return gpus * each
        if workers in ("cpu", "auto"):
            return 0
        return _count(workers, "--nproc-per-node") * each

    @property
    def shutdown_s(self) -> int:
        """How long workers have to end, in seconds."""
        given = self.shutdown_timeout
        return math.ceil(SHUTDOWN_TIMEOUT_S if given is None else given)

    @property
    def made_by(self) -> str:
        """The command line, as a comment."""
        line = shlex.join([*self.program.split(), *self._given(()), *self.command])
        return one_line(f"# Made by: {line}")

    def run(self, without: Collection[str]) -> list[str]:
        """The words of `rallypoint run` on each node, without the flags of those names."""
        return ["rallypoint", "run", *self._given(without), *self.command]

    def _given(self, without: Collection[str]) -> list[str]:
        words = []
        for name, value in self.texts.items():
            if name not in without:
                words += [name, value] if self.flags[name].takes_value else [name]
        return words


def script(words: Sequence[str]) -> int:
    """Run `rallypoint script WORDS`; returns the exit status."""
    kind, rest = (words[0], words[1:]) if words else ("", ())
    if kind in ("", "--help", "-h"):
        print(_USAGE)
        return 0 if kind else 2
    from rallypoint.lab.script import jobset, sbatch

    kinds: Mapping[str, tuple[Any, type[ScriptOptions]]] = {
        "slurm": (sbatch, sbatch.SbatchOptions),
        "jobset": (jobset, jobset.JobsetOptions),
    }
    if kind not in kinds:
        print(
            f"rallypoint script: {kind!r} is not a kind of script; use"
            f" {' or '.join(kinds)}, as in rallypoint script slurm --nnodes 2 train.py",
            file=sys.stderr,
        )
        return 2
    program, (module, table) = f"rallypoint script {kind}", kinds[kind]

    def act(options: ScriptOptions, command: list[str]) -> int:
        if options.gpus_per_node and "--nproc-per-node" not in options:  # a worker for each GPU
            texts = {**options.texts, "--nproc-per-node": f"{options.gpus_per_node}"}
            options = options.__replace__(texts=texts)
        request = options.__replace__(program=program, command=command)
        request.check(module.ANSWERS)
        print(module.text_of(request), end="")
        return 0

    return perform(
        program,
        rest,
        table,
        act,
        usage=module.USAGE,
        groups=[FlagGroup("", tuple(table.flags[name] for name in (*module.OWN, "--help")))],
        ending=_MORE,
        statuses=((InvalidArgumentError, 2),),
    )
