"""Reads from the flags what the workers are: their number, program and CPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from rallypoint.cli.number_flags import is_whole
from rallypoint.cli.options import UsageError
from rallypoint.launch.job import LOCAL_RANK_MACRO

PROGRAM = "rallypoint run"

_NOUNS = {"--module": "module", "--no-python": "program"}
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def count_workers(values: Mapping[str, str], environ: Mapping[str, str]) -> int:
    """The number of workers that --nproc-per-node asks for."""
    text = values.get("--nproc-per-node", "1")
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text in ("gpu", "xpu", "auto"):
        return _count_devices(text, environ)
    if not is_whole(text) or not int(text):
        raise UsageError(
            f"{PROGRAM}: --nproc-per-node is {text!r}; it must be 1 or more, 'auto', 'cpu', 'gpu'"
            " or 'xpu'."
        )
    return int(text)


def _count_devices(kind: str, environ: Mapping[str, str]) -> int:
    from rallypoint.cluster.devices import count_gpus, count_xpus

    if kind == "auto":
        devices = count_gpus(environ) or count_xpus(environ)
        return devices or len(os.sched_getaffinity(0))
    count = count_gpus(environ) if kind == "gpu" else count_xpus(environ)
    if not count:
        variable = "CUDA_VISIBLE_DEVICES" if kind == "gpu" else "ZE_AFFINITY_MASK"
        hides = f", or {variable} hides them" if environ.get(variable) is not None else ""
        raise UsageError(
            f"{PROGRAM}: --nproc-per-node {kind}: this machine has no such devices{hides}; give "
            "the number of workers, or 'cpu' for one per CPU."
        )
    return count


def bind_workers(
    values: Mapping[str, str], workers: int, environ: Mapping[str, str]
) -> tuple[tuple[frozenset[int], ...], str]:
    """By local rank, the CPUs that --numa-binding assigns to a worker, and a note on them."""
    mode = values.get("--numa-binding")
    if mode is None:
        return (), ""
    from rallypoint.cluster.affinity import bind, read_topology

    binding = bind(mode, read_topology(environ), workers)
    return binding.cpus, binding.note


def worker_program(
    values: Mapping[str, str],
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    is_run_once: bool,
) -> tuple[str, ...]:
    """The complete command of a worker. `is_run_once`: one worker runs it, and never restarts."""
    ways = [name for name in ("--run-path", "--module", "--no-python") if name in values]
    if ways == ["--run-path", "--no-python"]:
        ways = ["--run-path"]  # as torchrun documents it
    if len(ways) > 1:
        raise UsageError(f"{PROGRAM}: {ways[0]} and {ways[1]} cannot be combined; choose one.")
    way = ways[0] if ways else ""
    if not command:
        example = {"--module": "-m my_package.train", "--no-python": "--no-python ./train"}
        raise UsageError(
            f"{PROGRAM}: no {_NOUNS.get(way, 'script')} given; name one, as in:"
            f" {PROGRAM} {example.get(way, 'train.py')}"
        )
    _check_script(command, way, is_run_once=is_run_once)
    if command[0].startswith("-") and command[0] != "-" and way in ("", "--run-path"):
        command = [f"./{command[0]}", *command[1:]]  # Python would take it as an option
    if way == "--no-python":
        return tuple(command)
    # -u as in torchrun, so that what a worker printed before it died is not lost.
    python = (environ.get("PYTHON_EXEC") or sys.executable, "-u")
    if way == "--module":
        return (*python, "-m", *command)
    if way == "--run-path":
        return (*python, "-c", _RUN_PATH, *command)
    return (*python, *command)


def _cure(command: Sequence[str], way: str) -> str:
    """What to do about a script that does not exist."""
    script = command[0]
    program, *words = script.split(" ")
    if way == "" and program.rpartition("/")[2].startswith("python"):
        rest = " ".join([*words, *command[1:]]) or "train.py"
        return f"; the launcher starts Python itself: leave that word out, as in: {PROGRAM} {rest}"
    if words and os.path.exists(program):
        return f"; leave out the quotation marks, as in: {PROGRAM} {script}"
    import difflib

    directory = os.path.dirname(script)
    try:
        others = os.listdir(directory or ".")
    except OSError:
        return "; check its path."
    near = difflib.get_close_matches(os.path.basename(script), others, n=1, cutoff=0.8)
    return f"; did you mean {os.path.join(directory, near[0])}?" if near else "; check its path."


def _check_script(command: Sequence[str], way: str, *, is_run_once: bool) -> None:
    script = command[0]
    if way == "--module" or LOCAL_RANK_MACRO in script:
        return
    if way == "--no-python" and "/" not in script:  # looked up in PATH
        return
    if way == "" and script == "-":
        if not is_run_once:
            raise UsageError(
                f"{PROGRAM}: '-' is standard input, which only one worker can read, and only once;"
                " save the script in a file."
            )
        return
    if not os.path.exists(script):
        raise UsageError(
            f"{PROGRAM}: {_NOUNS.get(way, 'script')} {script!r} does not exist{_cure(command, way)}"
        )
    if way != "--no-python" and os.path.isdir(script):
        main = os.path.join(script, "__main__.py")
        if not os.path.exists(main):
            raise UsageError(
                f"{PROGRAM}: {script!r} is a directory without a __main__.py; name a script."
            )
