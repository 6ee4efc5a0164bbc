"""Whether a path can be used: a child process tries it, so that only the child can hang.

    python paths.py PATH [script]

The child lists a directory, and writes and removes a file there; it opens a file for reading. It
says first that it begins, since a busy machine may take long to start it, and then prints the
result as JSON. At its start it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import select
import stat
import sys
import tempfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.doctor.cluster_facts import PathLook

PATIENCE_S = 2.0
_START_S = 20.0  # for the child's start, on a busy machine
_LAST_S = 0.2  # for the end of a killed child; one in uninterruptible sleep is left to the system
_MOST_BYTES = 64 << 20
_CHILD = __file__


def look_at_path(path: str, *, is_script: bool = False, wait_s: float = PATIENCE_S) -> PathLook:
    """Try to read and write there, within a time limit."""
    import subprocess

    from rallypoint.doctor.cluster_facts import PathLook, PathState

    words = [sys.executable, "-I", "-S", _CHILD, path, *(["script"] if is_script else [])]
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    # Unbuffered, so that the first line takes nothing of the second one along.
    child = subprocess.Popen(words, bufsize=0, stdin=null, stdout=pipe, stderr=null)
    assert child.stdout is not None
    detail = digest = ""
    try:
        if select.select([child.stdout], [], [], _START_S)[0]:
            child.stdout.readline()
        out, _ = child.communicate(timeout=wait_s)
        found = json.loads(out)
        state, detail, digest = PathState[found["state"]], found["detail"], found["digest"]
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_LAST_S)
        state = PathState.HANGS
    except (ValueError, KeyError):
        state = PathState.UNREADABLE
        detail = f"the check of it ended with status {child.returncode}"
    return PathLook(path=path, state=state, detail=detail, digest=digest, is_script=is_script)


def _try(path: str, *, is_script: bool) -> dict[str, str]:
    """The name of the state, the system's error text, and the digest of a script."""
    found = {"state": "GOOD", "detail": "", "digest": ""}
    step = "MISSING"
    try:
        mode = os.stat(path).st_mode
        step = "UNREADABLE"
        if stat.S_ISDIR(mode):
            os.listdir(path)
            step = "READ_ONLY"
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(b"x")
        else:
            with open(path, "rb") as file:
                data = file.read(_MOST_BYTES if is_script else 1)
            found["digest"] = hashlib.sha256(data).hexdigest() if is_script else ""
    except OSError as error:
        is_absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
        found["state"] = step if step != "MISSING" or is_absent else "UNREADABLE"
        found["detail"] = error.strerror or str(error)
    return found


if __name__ == "__main__":
    print("looking", flush=True)
    print(json.dumps(_try(sys.argv[1], is_script=sys.argv[2:] == ["script"])))
