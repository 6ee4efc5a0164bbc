"""The job's directory, for the files in which workers record their errors, and for their logs.

The guardian, which always outlives the job, removes it unless the user asked for logs. Its name is
in every worker's environment: the last resort for finding processes that escaped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

from rallypoint.base.errors import HostError

_CLEAN_LOOKS = 5
_BETWEEN_LOOKS_S = 0.01


class JobDirectory:
    """A directory with torchrun's layout below it: attempt_N/LOCAL_RANK/{error.json, ...}.

    A process that takes the local rank of another one in the same round has files of its own, in
    attempt_N/LOCAL_RANK.2 and so on.

    Attributes:
        path: where it is; empty if it could not be created. Without logs that does no harm: error
            files are a convenience.
        attempt: the current round's part of it.

    Raises:
        HostError: the user asked for logs, and there is no place for them.
    """

    def __init__(
        self,
        run_id: str,
        environ: Mapping[str, str],
        *,
        log_directory: str | None = None,
        is_kept: bool = False,
    ) -> None:
        # By hand, because the tempfile module costs 9 ms to import.
        name = "".join(c if c.isalnum() or c in "-._" else "_" for c in run_id[:64])
        name = f"{name}_{os.urandom(4).hex()}"
        parent = os.path.abspath(log_directory or environ.get("TMPDIR") or "/tmp")
        self.is_kept = is_kept
        self._latest: dict[int, str] = {}  # by local rank
        self.path = f"{parent}/{name if log_directory else f'rallypoint_{name}'}"
        try:
            if log_directory:
                os.makedirs(parent, exist_ok=True)
            os.mkdir(self.path, 0o700)
        except OSError as error:
            if is_kept:
                raise HostError(
                    f"cannot create a directory for logs in {parent}: {error.strerror}; give "
                    "another with --log-dir."
                ) from None
            self.path = ""

    @property
    def to_remove(self) -> str:
        """What to delete at the end of the job; empty: nothing."""
        return "" if self.is_kept else self.path

    def start_round(self, number: int) -> None:
        """Before the files of a round."""
        self.attempt = f"{self.path}/attempt_{number}"

    def directory_of(self, local_rank: int) -> str:
        """The part of the latest process with that local rank."""
        return self._latest.get(local_rank, f"{self.attempt}/{local_rank}")

    def make_directory(self, local_rank: int) -> str:
        """Create the part of a new process; empty if that is not possible."""
        if not self.make_attempt():
            return ""
        part, number = f"{self.attempt}/{local_rank}", 1
        try:
            while not _make(part):
                number += 1
                part = f"{self.attempt}/{local_rank}.{number}"
        except OSError:
            return ""
        self._latest[local_rank] = part
        return part

    def make_attempt(self) -> bool:
        """Create the directory of the current round; returns whether it exists."""
        try:
            if self.path:
                _make(self.attempt)
        except OSError:
            return False
        return bool(self.path)

    def kill_marked(self) -> list[int]:
        """Kill processes with one of these error files in their environment, which are ours.

        Only for when the guardian, which is more reliable, is dead. A process shows no environment
        during exec, so nothing counts as gone at the first look.
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
    """Create a directory; False if it exists."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return False
    return True
