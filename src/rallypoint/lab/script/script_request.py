"""The request for a script, for any scheduler: one parsed command line. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from pathlib import PurePath

from rallypoint.base.printable import one_line
from rallypoint.base.record import Record
from rallypoint.base.worker_env import SHUTDOWN_TIMEOUT_S
from rallypoint.cli.flags import JobOptions
from rallypoint.cli.options import HELP, Flag, UsageError, integer, reader, text

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
    """The flags for all kinds of script: those of `rallypoint run`, and further ones."""

    job_name = Flag("the job's name in the scheduler (default: SCRIPT's name)", "NAME", text, None)
    gpus_per_node = Flag("number of GPUs to request on each node", "N", _count, 0)
    cpus_per_worker = Flag("number of CPUs to request for each worker (default 1)", "N",
                           _count, 1)  # fmt: skip
    help = HELP


class ScriptRequest(Record, kw_only=True):
    """One command line of `rallypoint script KIND`.

    Attributes:
        program: the command's name, for errors.
        scheduler: what the scheduler decides, e.g. "what Slurm says of each node".
        options: the flags that were typed.
        command: the user's script and its arguments.
    """

    program: str
    scheduler: str
    options: ScriptOptions
    command: Sequence[str]

    def check(self) -> None:
        """Check that there is a script, and no flag whose value the scheduler decides."""
        for name in _ANSWERED:
            if name in self.options:
                raise UsageError(f"{name} is {self.scheduler}; leave it out.")
        for name, value in self.options.texts.items():
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
        fewest, most = self.options.nnodes
        return fewest != most

    @property
    def job_name(self) -> str:
        """The job's name; by default train, for train.py or my_package.train."""
        name = PurePath(self.command[0]).name
        short = name.rpartition(".")[2] if self.options.module else PurePath(name).stem
        usual = "".join(each if each.isprintable() else "_" for each in short)
        return self.options.job_name or usual or "rallypoint"

    @property
    def cpus(self) -> int:
        """The CPUs of each node; 0: as many workers as CPUs."""
        workers, gpus = self.options.nproc_per_node, self.options.gpus_per_node
        each = self.options.cpus_per_worker
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
        given = self.options.shutdown_timeout
        return math.ceil(SHUTDOWN_TIMEOUT_S if given is None else given)

    @property
    def made_by(self) -> str:
        """The command line, as a comment."""
        line = shlex.join([*self.program.split(), *self._words(()), *self.command])
        return one_line(f"# Made by: {line}")

    def run(self, without: Collection[str]) -> list[str]:
        """The words of `rallypoint run` on each node, without the flags of those names."""
        return ["rallypoint", "run", *self._words(without), *self.command]

    def _words(self, without: Collection[str]) -> list[str]:
        words = []
        for name, value in self.options.texts.items():
            if name not in without:
                words += [name, value] if self.options.flags[name].takes_value else [name]
        return words
