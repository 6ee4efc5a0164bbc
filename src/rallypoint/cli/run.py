"""`rallypoint run`: from the command line to a `Job`, and on to the agent."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.cli.options import Flag, UsageError, describe, parse
from rallypoint.launch.job import Nodes

PROGRAM = "rallypoint run"

FLAGS = (
    Flag("--nproc-per-node", "workers on this machine: a number, or 'auto' or 'cpu' for\n"
         "one per CPU that this process may use (default 1)", "N"),
    Flag("--standalone", "one machine, nothing to agree on with others (the default)"),
    Flag("--nnodes", "machines (default 1)", "N"),
    Flag("--node-rank", "which of the machines this is, from 0 (default 0)", "N"),
    Flag("--master-addr", "machine 0's address (default 127.0.0.1)", "ADDRESS"),
    Flag("--master-port", "machine 0's port for the workers' store (default 29500; on one\n"
         "machine any free one)", "PORT"),
    Flag("--max-restarts", "how often workers that fail are all started again (default 0)", "N"),
    Flag("--monitor-interval", "accepted for torchrun's sake: workers are watched, not polled",
         "SECONDS"),
    Flag("--module", "SCRIPT is a module, as in python -m", short="-m"),
    Flag("--no-python", "SCRIPT is a program of its own, not Python's"),
    Flag("--run-path", "run SCRIPT by runpy.run_path inside the interpreter"),
    Flag("--log-prefix", "begin each line of the workers' output with FORMAT, which\n"
         "may use {rank}, {local_rank} and {host}, as in '{rank}: '", "FORMAT"),
    Flag("--shutdown-timeout", "from asking workers to end until they are killed\n"
         "(default 30)", "SECONDS"),
    Flag("--verbose", "tell each decision and its reason"),
    Flag("--help", "this text", short="-h"),
)  # fmt: skip

USAGE = """\
usage: rallypoint run [FLAGS] SCRIPT [ARGUMENTS...]

Start SCRIPT in several processes that work together. Each gets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT and torchrun's other variables. When one fails, the rest are stopped and
the first failure is told; when the launcher ends, however it ends, nothing is left running.

  rallypoint run --nproc-per-node 4 train.py --epochs 10     four workers on this machine
  rallypoint run --nproc-per-node auto -m my_package.train   one per CPU, as python -m
  rallypoint run --nproc-per-node 2 --no-python ./worker.sh  any program
  rallypoint run --nproc-per-node 4 --log-prefix '{rank}: ' train.py

Everything after SCRIPT is SCRIPT's, word for word, but for ${local_rank}, which is replaced.
"""

ENDINGS = """
Each flag can also be spelled with '_', and be set by a variable, as in PET_NPROC_PER_NODE=4.

Exit status: 0 if every worker succeeded; 1 if one failed; 2 if the command line is wrong;
128 + the signal's number if a signal stopped the launcher (a second Ctrl-C kills at once).
"""

_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run(words: Sequence[str]) -> int:
    """Perform `rallypoint run WORDS`; the exit status."""
    try:
        values, command = parse(words, FLAGS, program=PROGRAM, environ=os.environ)
        if "--help" in values:
            print(USAGE, describe(FLAGS), ENDINGS, sep="\n", end="")
            return 0
        from rallypoint.launch.agent import run as run_job
        from rallypoint.launch.job import Job

        nodes = read_nodes(values)
        job = Job(
            command=worker_program(values, command, os.environ),
            local_world_size=count_workers(values),
            max_restarts=_whole(values, "--max-restarts", 0),
            nodes=nodes,
            # As torchrun: nodes that are given one by one cannot agree on a random one.
            run_id=_new_run_id() if nodes.count == 1 else "none",
            host=os.uname().nodename,
            environ=os.environ,
            log_prefix=values.get("--log-prefix"),
            shutdown_timeout_s=_seconds(values, "--shutdown-timeout", 30.0),
            verbose="--verbose" in values,
        )
        return run_job(job)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except InvalidArgumentError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except HostError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1


def count_workers(values: Mapping[str, str]) -> int:
    """The number of workers that --nproc-per-node asks for."""
    text = values.get("--nproc-per-node", "1")
    if text in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    if text in ("gpu", "xpu"):
        raise UsageError(
            f"{PROGRAM}: --nproc-per-node {text}: devices are not counted, say how many workers,"
            " or 'cpu' for one per CPU."
        )
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise UsageError(
            f"{PROGRAM}: --nproc-per-node is {text!r}; it must be 1 or more, 'auto' or 'cpu'."
        )
    return int(text[:9])


def read_nodes(values: Mapping[str, str]) -> Nodes:
    """With which other machines the job runs."""
    count, _, most = values.get("--nnodes", "1").partition(":")
    if most not in ("", count):
        raise UsageError(
            f"{PROGRAM}: --nnodes {count}:{most}: the number of machines cannot change yet;"
            " give one number."
        )
    nodes = _whole({"--nnodes": count}, "--nnodes", 1)
    if "--standalone" in values and nodes != 1:
        raise UsageError(f"{PROGRAM}: --standalone is one machine; leave out --nnodes {nodes}.")
    return Nodes(
        count=nodes,
        node_rank=_whole(values, "--node-rank", 0),
        master_addr=values.get("--master-addr", "127.0.0.1"),
        master_port=_whole(values, "--master-port", 0 if nodes == 1 else 29500),
        token=os.environb.get(b"RALLYPOINT_TOKEN") or None,
    )


def worker_program(
    values: Mapping[str, str], command: Sequence[str], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The whole command of a worker."""
    if not command:
        raise UsageError(
            f"{PROGRAM}: no script given; name one, as in: {PROGRAM} --nproc-per-node 2 train.py"
        )
    ways = [name for name in ("--module", "--no-python", "--run-path") if name in values]
    if len(ways) > 1:
        raise UsageError(f"{PROGRAM}: {ways[0]} and {ways[1]} exclude each other; choose one.")
    script = command[0]
    is_path = "--module" not in values and ("--no-python" not in values or "/" in script)
    if is_path and not os.path.exists(script):
        kind = "program" if "--no-python" in values else "script"
        raise UsageError(f"{PROGRAM}: {kind} {script!r} does not exist; check its path.")
    if "--no-python" in values:
        return tuple(command)
    # -u as torchrun: what a worker printed before it died is not lost.
    python = (environ.get("PYTHON_EXEC") or sys.executable, "-u")
    if "--module" in values:
        return (*python, "-m", *command)
    if "--run-path" in values:
        return (*python, "-c", _RUN_PATH, *command)
    return (*python, *command)


def _whole(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"{PROGRAM}: {name} is {text!r}; it must be a whole number.")
    return int(text)


def _seconds(values: Mapping[str, str], name: str, default: float) -> float:
    text = values.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise UsageError(f"{PROGRAM}: {name} is {text!r}; it must be a number of seconds.")
    return seconds


def _new_run_id() -> str:
    # A random UUID by hand, because the uuid module costs 8 ms to import.
    digits = bytearray(os.urandom(16))
    digits[6] = digits[6] & 0x0F | 0x40
    digits[8] = digits[8] & 0x3F | 0x80
    text = digits.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
