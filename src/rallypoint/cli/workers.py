"""From flags to what the workers are: how many, which program, on which CPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from rallypoint.cli.numbers import is_whole
from rallypoint.cli.options import UsageError
from rallypoint.launch.job import LOCAL_RANK_MACRO

PROGRAM = "rallypoint run"

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
    from rallypoint.launch.devices import count_gpus, count_xpus

    if kind == "auto":
        devices = count_gpus(environ) or count_xpus(environ)
        return devices or len(os.sched_getaffinity(0))
    count = count_gpus(environ) if kind == "gpu" else count_xpus(environ)
    if not count:
        variable = "CUDA_VISIBLE_DEVICES" if kind == "gpu" else "ZE_AFFINITY_MASK"
        hides = f", or {variable} hides them" if environ.get(variable) is not None else ""
        raise UsageError(
            f"{PROGRAM}: --nproc-per-node {kind}: this machine has no such devices{hides}; say how"
            " many workers, or 'cpu' for one per CPU."
        )
    return count


def bind_workers(
    values: Mapping[str, str], workers: int, environ: Mapping[str, str]
) -> tuple[tuple[frozenset[int], ...], str]:
    """By local rank, the CPUs that --numa-binding leaves to a worker, and what to say of it."""
    mode = values.get("--numa-binding")
    if mode is None:
        return (), ""
    from rallypoint.launch.affinity import bind, read_topology

    binding = bind(mode, read_topology(environ), workers)
    return binding.cpus, binding.note


def worker_program(
    values: Mapping[str, str], command: Sequence[str], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The whole command of a worker."""
    if not command:
        raise UsageError(
            f"{PROGRAM}: no script given; name one, as in: {PROGRAM} --nproc-per-node 2 train.py"
        )
    ways = [name for name in ("--run-path", "--module", "--no-python") if name in values]
    if len(ways) > 1 and ways != [
        "--run-path",
        "--no-python",
    ]:  # there torchrun documents the first
        raise UsageError(f"{PROGRAM}: {ways[0]} and {ways[1]} exclude each other; choose one.")
    script = command[0]
    is_path = "--module" not in values and ("--no-python" not in values or "/" in script)
    if is_path and LOCAL_RANK_MACRO not in script and not os.path.exists(script):
        kind = "program" if "--no-python" in values else "script"
        raise UsageError(f"{PROGRAM}: {kind} {script!r} does not exist; check its path.")
    if ways == ["--no-python"]:
        return tuple(command)
    # -u as torchrun: what a worker printed before it died is not lost.
    python = (environ.get("PYTHON_EXEC") or sys.executable, "-u")
    if "--module" in values:
        return (*python, "-m", *command)
    if "--run-path" in values:
        return (*python, "-c", _RUN_PATH, *command)
    return (*python, *command)
