"""Runs a command that compiles, and shows how far it is.

    build_progress.py WHAT LOG COMMAND...

The command's output goes to the file LOG. On a terminal one line is rewritten:

    building rallypoint: 31 of 78 files, about 60 s left

elsewhere there is such a line at each quarter. The last line gives the time. If the command fails,
what it printed of its failure follows, and its exit status is ours. Progress is read from ninja's
lines ("[31/78] Building ..."); a command that prints none is shown without it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field

_STEP = re.compile(r"\s*\[([1-9]\d*)/(\d+)\] (?:Building|Linking)")
_FAILURE = re.compile(r"\s*(FAILED: |CMake Error|ninja: error|Traceback )")
_QUARTERS = 4
_LAST_LINES = 40  # of a failure that is not recognised


@dataclass
class Progress:
    """How many of the files are done, and how long the others may take."""

    began: float  # before the first file
    done: int = 0
    total: int = 0
    lines: list[str] = field(default_factory=list)
    _failed_at: int | None = None

    def add(self, line: str, now: float) -> bool:
        """Take a line of the build's; True if it tells of a step."""
        if self._failed_at is None and _FAILURE.match(line):
            self._failed_at = len(self.lines)
        self.lines.append(line)
        step = _STEP.match(line)
        if step is None:
            if self.done == 0:
                self.began = now  # CMake is still examining the machine
            return False
        self.done, self.total = int(step[1]), int(step[2])
        return True

    def left_s(self, now: float) -> float:
        """The seconds that are left, if the other files take as long as those that are done."""
        return (now - self.began) / self.done * (self.total - self.done)

    def text(self, now: float) -> str:
        """As in "31 of 78 files, about 60 s left"."""
        text = f"{self.done} of {self.total} files"
        return f"{text}, about {self.left_s(now):.0f} s left" if self.done < self.total else text

    @property
    def quarter(self) -> int:
        """How many quarters of the files are done."""
        return self.done * _QUARTERS // self.total

    @property
    def failure(self) -> list[str]:
        """What was printed from the first failure on."""
        first = -_LAST_LINES if self._failed_at is None else self._failed_at
        return self.lines[first:]


def run(what: str, log: str, command: list[str]) -> int:
    """Run the command, show its progress, and return its exit status."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    began = time.monotonic()
    progress = Progress(began)
    quarter = 0

    def show(text: str) -> None:
        if is_terminal:
            print(f"\r\033[Kbuilding {what}{text}", end="", flush=True)
        else:
            print(f"building {what}{text}", flush=True)

    show("")
    environ = os.environ | {"NINJA_STATUS": "[%f/%t] "}
    with (
        open(log, "w", buffering=1, encoding="utf-8") as kept,  # noqa: PTH123
        subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as build,
    ):
        assert build.stdout is not None
        for line in build.stdout:
            kept.write(line)
            now = time.monotonic()
            if not progress.add(line, now):
                continue
            if is_terminal or progress.quarter > quarter:
                show(f": {progress.text(now)}")
            quarter = progress.quarter
    took = f"{time.monotonic() - began:.0f} s"
    if is_terminal:
        print("\r\033[K", end="")
    if build.returncode == 0:
        print(f"built {what} in {took}", flush=True)
        return 0
    sys.stdout.flush()
    sys.stderr.writelines(progress.failure)
    print(
        f"rallypoint: building {what} failed after {took}: see above; all output is in {log}",
        file=sys.stderr,
    )
    return build.returncode if build.returncode > 0 else 128 - build.returncode


def main() -> int:
    """Read the command line, and run what it names."""
    _, what, log, *command = sys.argv
    try:
        return run(what, log, command)
    except KeyboardInterrupt:  # the command, in the same group, has had the signal, too
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
