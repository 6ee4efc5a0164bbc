"""The job's temporary directory, for the files in which workers record their errors.

The guardian removes it, because it always outlives the job. Its name is in every worker's
environment: the last resort for finding processes that got away.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

_CLEAN_LOOKS = 5
_BETWEEN_LOOKS_S = 0.01


class Scratch:
    """A directory with torchrun's layout below it: attempt_N/LOCAL_RANK/error.json.

    Attributes:
        path: where it is; empty if it could not be made. Error files are a convenience: the job
            runs without them.
    """

    def __init__(self, run_id: str, environ: Mapping[str, str]) -> None:
        # By hand, because the tempfile module costs 9 ms to import.
        name = "".join(c if c.isalnum() or c in "-._" else "_" for c in run_id[:64])
        parent = os.path.abspath(environ.get("TMPDIR") or "/tmp")
        self.path = f"{parent}/rallypoint_{name}_{os.urandom(4).hex()}"
        if not _make(self.path):
            self.path = ""

    def start_round(self, number: int) -> None:
        """Before the error files of a round: a place for them."""
        self._attempt = f"{self.path}/attempt_{number}"
        if self.path:
            _make(self._attempt)

    def error_file(self, local_rank: int) -> str | None:
        """Where this worker may record its error; None if there is no place for it."""
        directory = f"{self._attempt}/{local_rank}"
        return f"{directory}/error.json" if self.path and _make(directory) else None

    def kill_marked(self) -> list[int]:
        """Kill what carries one of these error files in its environment, and so is ours.

        Only for when the guardian, which knows better, is dead. A process shows no environment
        while it becomes another program, so that nothing counts as gone at the first look.
        """
        killed: list[int] = []
        clean = 0
        while self.path and clean < _CLEAN_LOOKS:
            found = self._kill_marked_once()
            clean = 0 if found else clean + 1
            killed += found
            time.sleep(_BETWEEN_LOOKS_S)
        return sorted(set(killed))

    def _kill_marked_once(self) -> list[int]:
        mark = os.fsencode(f"TORCHELASTIC_ERROR_FILE={self.path}/")
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


def _make(path: str) -> bool:
    try:
        os.mkdir(path, 0o700)
    except OSError:
        return False
    return True
