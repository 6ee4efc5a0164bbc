"""`python -m rallypoint.launch`: torch.distributed.launch's command line, older than torchrun's.

The same flags, and one rule more: without --use-env, the script gets --local-rank=N as its first
argument.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rallypoint.cli.flags import ENDINGS, FLAGS, GROUPS, USAGE
from rallypoint.cli.options import Flag, Group, UsageError, describe_groups, parse
from rallypoint.cli.run import PROGRAM, run_values
from rallypoint.launch.job import LOCAL_RANK_MACRO

_USE_ENV = Flag("--use-env", "do not give SCRIPT --local-rank=N; it reads LOCAL_RANK itself")


def launch(words: Sequence[str]) -> int:
    """Perform `python -m rallypoint.launch WORDS`; the exit status."""
    try:
        values, command = parse(words, (*FLAGS, _USE_ENV), program=PROGRAM, environ=os.environ)
        if "--help" in values:
            groups = (*GROUPS, Group("Of torch.distributed.launch", (_USE_ENV,)))
            print(USAGE, describe_groups(groups), ENDINGS, sep="\n", end="")
            return 0
        if "--use-env" not in values:
            if "--no-python" in values:
                raise UsageError(
                    f"{PROGRAM}: --no-python needs --use-env here, because a program that is not"
                    " Python's may not take --local-rank."
                )
            command = [*command[:1], f"--local-rank={LOCAL_RANK_MACRO}", *command[1:]]
        return run_values(values, command)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the agent was there to handle it
        return 130
