"""Benchmarks that are their own workers: the script starts itself again under `rallypoint run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hosts import Hosts

_ANSWER = "RALLYPOINT_BENCHMARK_ANSWER"


def is_worker() -> bool:
    """Whether this process is one of those that `measured_by` starts."""
    return _ANSWER in os.environ


def answer(value: object) -> None:
    """What `measured_by` returns; of one worker."""
    Path(os.environ[_ANSWER]).write_text(json.dumps(value))


def measured_by(ranks: int, *flags: str, **environ: str) -> Any:  # noqa: ANN401 - of JSON
    """Run this script with its arguments in workers; what one of them answered.

    Args:
        flags: more of the launcher's.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "answer.json")
        command = [sys.executable, "-m", "rallypoint", "run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), *flags, *sys.argv]
        subprocess.run(command, check=True, env={**os.environ, **environ, _ANSWER: str(result)})
        return json.loads(result.read_text())


def measured_on(hosts: Hosts) -> Any:  # noqa: ANN401 - of JSON
    """As `measured_by`, with one worker on each of these test hosts."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "answer.json")
        nodes = ["--nnodes", str(len(hosts.hosts)), "--master-addr", "host1", "--node-rank"]
        environ = {**os.environ, _ANSWER: str(result)}
        agents = []
        for rank, host in enumerate(hosts.hosts):
            command = [sys.executable, "-m", "rallypoint", "run", *nodes, str(rank), *sys.argv]
            agents.append(host.popen(command, env=environ))
        for agent in agents:
            agent.wait()
        return json.loads(result.read_text())
