"""`python -m rallypoint.launch`: torch.distributed.launch's command line, older than torchrun's.

It has the same flags, and one more rule: without --use-env, the script gets --local-rank=N as its
first argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.cli.flags import GROUPS
from rallypoint.cli.options import Flag, FlagGroup, UsageError
from rallypoint.cli.run import PROGRAM, perform, read_job
from rallypoint.launch.job import LOCAL_RANK_MACRO, Job

_USE_ENV = Flag("--use-env", "do not give SCRIPT --local-rank=N; it reads LOCAL_RANK itself")
_GROUPS = (*GROUPS, FlagGroup("Of torch.distributed.launch", (_USE_ENV,)))


def launch(words: Sequence[str]) -> int:
    """Run `python -m rallypoint.launch WORDS`; returns the exit status."""
    try:
        return perform(words, _GROUPS, _read_job, launcher=("-m", "rallypoint.launch"))
    except KeyboardInterrupt:  # before the agent could handle it
        return 130


def _read_job(
    values: Mapping[str, str], command: Sequence[str], environ: Mapping[str, str]
) -> tuple[Job, list[str]]:
    if "--use-env" not in values:
        if "--no-python" in values:
            raise UsageError(
                f"{PROGRAM}: --no-python needs --use-env here, because a program that is not a "
                "Python script may not accept --local-rank."
            )
        if command:
            command = [command[0], f"--local-rank={LOCAL_RANK_MACRO}", *command[1:]]
    return read_job(values, command, environ)
