"""Whether a path can be used: a child process tries it, so that only the child can hang."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from pathlib import Path

from rallypoint.doctor.cluster_facts import PathLook, PathState

PATIENCE_S = 2.0
_START_S = 20.0  # for the child's start, on a busy machine
_LAST_S = 0.2  # for the end of a killed child; one in uninterruptible sleep is left to the system
_CHILD = str(Path(__file__).with_name("path_child.py"))


def look_at_path(path: str, *, is_script: bool = False, wait_s: float = PATIENCE_S) -> PathLook:
    """Try to read and write there, within a time limit."""
    words = [sys.executable, "-I", "-S", _CHILD, path, *(["script"] if is_script else [])]
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    # Unbuffered, so that the first line takes nothing of the second one along.
    child = subprocess.Popen(words, bufsize=0, stdin=null, stdout=pipe, stderr=null)
    assert child.stdout is not None
    try:
        if select.select([child.stdout], [], [], _START_S)[0]:
            child.stdout.readline()
        out, _ = child.communicate(timeout=wait_s)
        found = json.loads(out)
        state = PathState[found["state"]]
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_LAST_S)
        return PathLook(path=path, state=PathState.HANGS, is_script=is_script)
    except (ValueError, KeyError):
        why = f"the check of it ended with status {child.returncode}"
        return PathLook(path=path, state=PathState.UNREADABLE, detail=why, is_script=is_script)
    return PathLook(
        path=path,
        state=state,
        detail=found["detail"],
        digest=found["digest"],
        is_script=is_script,
    )
