"""The job's temporary directory, for the files in which workers record their errors.

Its name is in every worker's environment: the last resort for finding processes that got away.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping


class Scratch:
    """A temporary directory with torchrun's layout below it: attempt_N/LOCAL_RANK/error.json."""

    def __init__(self, run_id: str, environ: Mapping[str, str]) -> None:
        name = "".join(c if c.isalnum() or c in "-._" else "_" for c in run_id[:64])
        parent = environ.get("TMPDIR") or "/tmp"
        # By hand, because the tempfile module costs 9 ms to import.
        self._path = f"{parent}/rallypoint_{name}_{os.urandom(4).hex()}"
        self._made: list[str] = []
        for path in (self._path, f"{self._path}/attempt_0"):
            self._make(path)

    def error_file(self, local_rank: int) -> str | None:
        """Where this worker may record its error; None if there is no place for it."""
        directory = f"{self._path}/attempt_0/{local_rank}"
        return f"{directory}/error.json" if self._make(directory) else None

    def remove(self) -> None:
        """Remove the directory; what else was put there stays."""
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                os.unlink(f"{path}/error.json")
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def kill_marked(self) -> list[int]:
        """Kill what carries one of these error files in its environment, and so is ours.

        Only for when the guardian, which knows better, is dead.
        """
        mark = os.fsencode(f"TORCHELASTIC_ERROR_FILE={self._path}/")
        killed = []
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    is_ours = any(text.startswith(mark) for text in file.read().split(b"\0"))
                if is_ours:
                    os.kill(int(name), signal.SIGKILL)
                    killed.append(int(name))
            except OSError:
                continue
        return killed

    def _make(self, path: str) -> bool:
        try:
            os.mkdir(path, 0o700)
        except OSError:
            return False  # error files are a convenience; the job runs without them
        self._made.append(path)
        return True
