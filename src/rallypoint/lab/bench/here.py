"""This machine alone, as the place where contenders run."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rallypoint.lab.bench.contenders import Setting, contender
from rallypoint.lab.bench.crew import Crew, check_ranks, new_address
from rallypoint.lab.bench.environments import Environments


class LocalCrew(Crew):
    """All processes of a contender, on this machine."""

    version = ""


class Here:
    """Starts contenders on this machine."""

    def __init__(self, ranks: int, environments: Environments, *, pin: bool) -> None:
        self._ranks = ranks
        self._pin = pin
        self._environments = environments
        self._crews: list[Crew] = []
        self._directory = tempfile.TemporaryDirectory(prefix="rallypoint-bench-")

    def start(self, name: str, begin: Mapping[str, Any]) -> LocalCrew:
        """Start the processes of a contender."""
        setting = Setting(self._ranks, self._pin, new_address())
        crew = LocalCrew(
            name,
            ranks=self._ranks,
            address=setting.address,
            directory=Path(self._directory.name, name),
        )
        self._crews.append(crew)
        plan = contender(name, setting, self._environments)
        answers = crew.start(plan.command, plan.environ, {**begin, "cores": cores(pin=self._pin)})
        check_ranks(name, answers)
        crew.version = answers[0]["version"]
        return crew

    def describe(self) -> str:
        """This machine, in a few words."""
        return f"{cpu()}, {len(os.sched_getaffinity(0))} cores; {self.load()}"

    def load(self) -> str:
        """How busy this machine is."""
        return f"load average {os.getloadavg()[0]:.1f}"

    def close(self) -> None:
        """End everything that was started."""
        end_all(self._crews)
        self._directory.cleanup()


def end_all(crews: list[Crew]) -> None:
    """Tell all to leave first, so that they end at the same time, and then make sure of each."""
    for crew in crews:
        crew.dismiss()
    for crew in crews:
        crew.end()


def cores(*, pin: bool) -> list[int]:
    """The core for each local rank, in turn; empty if ranks are not bound."""
    return sorted(os.sched_getaffinity(0)) if pin else []


def cpu() -> str:
    """The name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
