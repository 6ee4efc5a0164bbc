"""Whether a path can be used: a child process tries it, so that only the child can hang.

It hangs if it neither runs nor waits for a core, for that long; on a busy machine it may be late.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from rallypoint.cluster.health.facts import PathLook, PathState

PATIENCE_S = 2.0
_MOST_S = 20.0  # for a child that gets no core: whoever asked for this waits for 30 s
_LAST_S = 0.2  # for the end of a killed child; one in uninterruptible sleep is left to the system
_STEP_S = 0.05
_CHILD = str(Path(__file__).with_name("path_child.py"))


def look_at_path(path: str, *, is_script: bool = False, wait_s: float = PATIENCE_S) -> PathLook:
    """Try to read and write there, within a time limit."""
    words = [sys.executable, "-I", "-S", _CHILD, path, *(["script"] if is_script else [])]
    child = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        # The first line comes before it touches the path.
        found = json.loads(_lines(child, wait_s).partition(b"\n")[2])
        state = PathState[found["state"]]
    except TimeoutError:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_LAST_S)
        return PathLook(path=path, state=PathState.HANGS, is_script=is_script)
    except (ValueError, KeyError):
        child.wait()
        why = f"the check of it ended with status {child.returncode}"
        return PathLook(path=path, state=PathState.UNREADABLE, detail=why, is_script=is_script)
    child.wait()
    return PathLook(
        path=path,
        state=state,
        detail=found["detail"],
        digest=found["digest"],
        is_script=is_script,
    )


def _lines(child: subprocess.Popen[bytes], wait_s: float) -> bytes:
    """What it prints until its end.

    Raises:
        TimeoutError: it hangs.
    """
    assert child.stdout is not None
    data, before = b"", ""
    now = time.monotonic()
    last, until = now + _MOST_S, now + wait_s
    with child.stdout as output:
        while True:
            if select.select([output], [], [], _STEP_S)[0]:
                part = os.read(output.fileno(), 1 << 16)
                if not part:
                    return data
                data += part
            now, progress = time.monotonic(), _progress(child.pid)
            if not data or not progress or progress != before:
                before, until = progress, now + wait_s
            if now > min(until, last):
                raise TimeoutError


def _progress(pid: int) -> str:
    """What changes whenever it gets a core; empty while it waits for one, or has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        times = Path(f"/proc/{pid}/schedstat").read_text("ascii")
    except (OSError, IndexError):
        return "" if not Path("/proc/self/stat").exists() else "unknown"
    return "" if state[0] in "RZX" else times
