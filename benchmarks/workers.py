"""Benchmarks that are their own workers: the script starts itself again under `rallypoint run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ANSWER = "RALLYPOINT_BENCHMARK_ANSWER"


def is_worker() -> bool:
    """Whether this process is one of those that `measured_by` starts."""
    return _ANSWER in os.environ


def answer(value: object) -> None:
    """What `measured_by` returns; of one worker."""
    Path(os.environ[_ANSWER]).write_text(json.dumps(value))


def measured_by(ranks: int, **environ: str) -> Any:  # noqa: ANN401 - of JSON
    """Run this script with its arguments in workers; what one of them answered."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "answer.json")
        command = [sys.executable, "-m", "rallypoint", "run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), *sys.argv]
        subprocess.run(command, check=True, env={**os.environ, **environ, _ANSWER: str(result)})
        return json.loads(result.read_text())
