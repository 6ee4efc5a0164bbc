"""The request for a script, for any scheduler: one parsed command line. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath

from rallypoint.base.record import Record
from rallypoint.base.wording import one_line
from rallypoint.cli.nodes import read_nnodes
from rallypoint.cli.number_flags import is_whole, seconds
from rallypoint.cli.options import Flag, UsageError

# Flags for all kinds of script, in addition to those of `rallypoint run`.
COMMON_FLAGS = (
    Flag("--job-name", "the job's name in the scheduler (default: SCRIPT's name)", "NAME"),
    Flag("--gpus-per-node", "number of GPUs to request on each node", "N"),
    Flag("--cpus-per-worker", "number of CPUs to request for each worker (default 1)", "N"),
)
# Flags that differ from node to node, or whose values the scheduler provides.
_ANSWERED = (
    *("--node-rank", "--local-addr", "--master-addr", "--master-port", "--standalone", "--on"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--hosts", "--hostfile"),
)


class ScriptRequest(Record, kw_only=True):
    """One command line of `rallypoint script KIND`.

    Attributes:
        program: the command's name, for errors.
        scheduler: what the scheduler decides, e.g. "what Slurm says of each node".
        values: the flags that were typed, by the names in `flags`.
        command: the user's script and its arguments.
    """

    program: str
    scheduler: str
    flags: Sequence[Flag]
    values: Mapping[str, str]
    command: Sequence[str]

    def check(self) -> None:
        """Check that there is a script, and no flag whose value the scheduler decides."""
        for name in _ANSWERED:
            if name in self.values:
                raise UsageError(f"{self.program}: {name} is {self.scheduler}; leave it out.")
        for name, value in self.values.items():
            if not value.isprintable():
                raise UsageError(
                    f"{self.program}: {name} is {value!r}; leave out what is not printable, as it"
                    " could end a line of the script."
                )
        if not self.command:
            raise UsageError(
                f"{self.program}: no script given; name one, as in: {self.program} train.py"
            )

    @property
    def nodes(self) -> tuple[int, int]:
        """The minimum and maximum number of nodes."""
        return read_nnodes(self.values.get("--nnodes", "1"))

    @property
    def is_elastic(self) -> bool:
        """Whether the job continues with fewer nodes than the maximum."""
        fewest, most = self.nodes
        return fewest != most

    @property
    def job_name(self) -> str:
        """The job's name; by default train, for train.py or my_package.train."""
        name = PurePath(self.command[0]).name
        short = name.rpartition(".")[2] if "--module" in self.values else PurePath(name).stem
        usual = "".join(each if each.isprintable() else "_" for each in short)
        return self.values.get("--job-name") or usual or "rallypoint"

    @property
    def gpus(self) -> int:
        """The GPUs of each node; 0: none are requested."""
        return self.count("--gpus-per-node", 0)

    @property
    def cpus(self) -> int:
        """The CPUs of each node; 0: as many workers as CPUs."""
        workers = self.values.get("--nproc-per-node", "1")
        each = self.count("--cpus-per-worker", 1)
        if workers in ("gpu", "xpu") and not self.gpus:
            raise UsageError(
                f"{self.program}: --nproc-per-node {workers} counts the devices of a node, so the "
                "script must request some; add --gpus-per-node N."
            )
        if workers in ("gpu", "xpu", "auto") and self.gpus:
            return self.gpus * each
        if workers in ("cpu", "auto"):
            return 0
        return self.count("--nproc-per-node", 1) * each

    @property
    def shutdown_s(self) -> int:
        """How long workers have to end, in seconds."""
        return math.ceil(seconds(self.values, "--shutdown-timeout", 30.0))

    def count(self, name: str, default: int) -> int:
        """The value of a flag as a number, 1 or more, or the default."""
        text = self.values.get(name, str(default))
        if not is_whole(text) or (name in self.values and not int(text)):
            raise UsageError(
                f"{self.program}: {name} is {text!r}; it must be an integer of at least 1."
            )
        return int(text)

    @property
    def made_by(self) -> str:
        """The command line, as a comment."""
        line = shlex.join([*self.program.split(), *self._words(self.values), *self.command])
        return one_line(f"# Made by: {line}")

    def run(self, without: Collection[str]) -> list[str]:
        """The words of `rallypoint run` on each node, without the flags of those names."""
        kept = {name: value for name, value in self.values.items() if name not in without}
        return ["rallypoint", "run", *self._words(kept), *self.command]

    def _words(self, values: Mapping[str, str]) -> list[str]:
        with_value = {flag.name for flag in self.flags if flag.takes_value}
        words = []
        for name, value in values.items():
            words += [name, value] if name in with_value else [name]
        return words
