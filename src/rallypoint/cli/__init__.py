"""The command line: `rallypoint COMMAND ...`, and `rallyrun` for `rallypoint run`.

Each command is a function in the module of the same name, here or in rallypoint.lab, which is
imported only when the command is called.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

import rallypoint

GROUPS = {
    "Run": {
        "run": "launch a distributed job",
        "stop": "end a running job on all its nodes",
        "script": "print a batch script for Slurm or a manifest for Kubernetes",
        "store": "serve a key-value store that outlives the nodes of a job",
    },
    "Look": {
        "ps": "list your jobs that run on this machine",
        "top": "watch a running job: who is slow, and who is stuck",
        "page": "watch a running job in a browser",
        "metrics": "serve metrics of your running jobs to Prometheus, or write them to a file",
        "status": "show what each worker of a running job is doing",
        "explain": "explain why a job hangs, is slow, or failed",
        "logs": "print the output of the workers of a running job",
        "stacks": "print the Python stacks of the workers of a running job",
        "trace": "record a timeline of the calls of a running job, for Perfetto",
    },
    "Prepare": {
        "doctor": "find what prevents a job from starting, and how to fix it",
        "where": "show the detected cluster environment, such as a Slurm step",
        "completion": "print a script that completes commands, flags and jobs in a shell",
    },
    "Lab": {
        "bench": "measure collectives beside other libraries, or calibrate predictions",
        "simulate": "predict the time of collective algorithms on many ranks",
    },
}
_COMMANDS = sorted(name for group in GROUPS.values() for name in group)

_STUDIES = {"bench", "script", "simulate", "trace"}  # in rallypoint.lab

# What other programs call it.
_MEANT = {
    **dict.fromkeys(("cancel", "end", "kill"), "stop"),
    **dict.fromkeys(("exporter", "prometheus"), "metrics"),
    **dict.fromkeys(("htop", "monitor", "watch"), "top"),
    **dict.fromkeys(("browser", "dashboard", "ui", "web"), "page"),
    **dict.fromkeys(("jobs", "list", "ls", "squeue"), "ps"),
    **dict.fromkeys(("launch", "mpirun", "start", "torchrun"), "run"),
    **dict.fromkeys(("check", "diagnose"), "doctor"),
    **dict.fromkeys(("debug", "hang", "why"), "explain"),
    "version": "--version",
    "--help-all": "rallypoint run --help-all",
}

_EXAMPLES = """\
  rallypoint run --nproc-per-node 4 train.py    four workers on this machine
  rallypoint help run                           the same as rallypoint run --help
  rallypoint --version
"""


def main() -> int:
    """Run the `rallypoint` program; returns the exit status."""
    return _guarded(_dispatch, sys.argv[1:])


def main_run() -> int:
    """Run the `rallyrun` program, which is `rallypoint run`; returns the exit status."""
    from rallypoint.cli.run import run

    return _guarded(run, sys.argv[1:])


def _with_command(words: Sequence[str]) -> list[str]:
    """The words with the command first, which follows a flag here or is missing before a script;
    empty if it is neither.
    """
    for at, word in enumerate(words):
        if word.endswith(".py"):
            return ["run", *words]
        if word in _COMMANDS:
            return [word, *words[:at], *words[at + 1 :]]
        if not words[0].startswith("-"):
            break
    return []


def _guarded(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    try:
        status = command(words)
        if sys.stdout is not None:  # None if the descriptor was closed at the start
            sys.stdout.flush()  # while a failure can still be reported
    except KeyboardInterrupt:  # before the agent could handle it
        return 130
    except MemoryError:
        from rallypoint.base.refusals import refused

        print(f"rallypoint: {refused('mmap', errno.ENOMEM)}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            return _refused(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader of our output is gone
            return 128 + signal.SIGPIPE
        print(f"rallypoint: cannot write to the standard output: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _refused(error: OSError) -> int:
    from rallypoint.base.refusals import refusal_in

    refusal = refusal_in(error)
    if refusal is None:
        raise error
    print(f"rallypoint: {refusal}", file=sys.stderr)
    return 1


def command_of(name: str) -> Callable[[Sequence[str]], int]:
    """The function that carries out a command."""
    room = "lab" if name in _STUDIES else "cli"
    command: Callable[[Sequence[str]], int] = getattr(
        importlib.import_module(f"rallypoint.{room}.{name}"), name
    )
    return command


def _dispatch(words: Sequence[str]) -> int:
    name = words[0] if words else "--help"
    if name == "help" and words[1:]:
        words = [words[1], "--help"]
        name = words[0]
    if name in _COMMANDS:
        return command_of(name)(words[1:])
    if name in ("--help", "-h", "help"):
        print("usage: rallypoint COMMAND ...\n")
        for title, commands in GROUPS.items():
            rows = [f"  {command:<12}{text}" for command, text in commands.items()]
            print(f"{title}:", *rows, "", sep="\n")
        print(_EXAMPLES, end="")
        return 0 if words else 2
    if name in ("--version", "-V"):
        print("rallypoint", rallypoint.__version__)
        return 0
    from rallypoint.cli.options import suggestion

    kind = "flag" if name.startswith("-") else "command"
    near = [each for each in _COMMANDS if each != "stop"]  # it is too dangerous to suggest
    meant_words = _with_command(words)
    if meant_words:
        shown = " ".join(meant_words[:4]) + " ..." * (len(meant_words) > 4)
        hint = f"; did you mean: rallypoint {shown}?"
    else:
        meant = f"; did you mean {_MEANT[name]}?" if name in _MEANT else suggestion(name, near)
        hint = meant or f"; the commands are: {', '.join(_COMMANDS)}."
    print(f"rallypoint: unknown {kind} {name}{hint}", file=sys.stderr)
    return 2
