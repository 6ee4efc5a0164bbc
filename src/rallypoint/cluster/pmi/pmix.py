"""Passes a text from rank 0 to all ranks through PMIx, which Open MPI's mpirun serves.

A process can initialise the PMIx library only once; if we did, MPI_Init would fail later. Therefore
a child process does it (pmix_child.py), which ends after this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes.util
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rallypoint.base.errors import HostError
from rallypoint.cluster.meeting.waiting import Waiting

_CHILD = Path(__file__).with_name("pmix_child.py")
_NAME = "libpmix.so.2"
_FAREWELL_S = 2.0
_MOST_BYTES = 65536


def pass_on(text: str, waiting: Waiting, environ: Mapping[str, str]) -> str:
    """Return rank 0's text on all ranks; only its `text` is not empty. All processes of the job
    call it.

    Raises:
        HostError: there is no PMIx library here, or it failed.
        StoreTimeoutError: not all processes arrived in time.
    """
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_CHILD), *libraries(environ)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        start_new_session=True,  # signals to this process must not reach it
    )
    try:
        _tell(child, text)
        said = _line_of(child, waiting)
    except BaseException:
        child.kill()
        child.communicate()
        raise
    if not said:
        _, err = child.communicate()
        lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit status {child.returncode}"
        raise HostError(
            f"the launcher cannot pass on the ranks' meeting point (PMIx): {why}; import mpi4py.MPI"
            " before init_process_group, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    atexit.register(_end, child, os.getpid())
    return said.decode().strip()


def _tell(child: subprocess.Popen[bytes], text: str) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its own output says why it ended
        child.stdin.write(f"{text}\n".encode())
        child.stdin.flush()


def _line_of(child: subprocess.Popen[bytes], waiting: Waiting) -> bytes:
    """The child's first line; empty if it has failed."""
    assert child.stdout is not None
    said = b""
    while not said.endswith(b"\n"):
        if not select.select((child.stdout,), (), (), waiting.slice_s)[0]:
            waiting.check()
        elif not (part := os.read(child.stdout.fileno(), _MOST_BYTES)):
            return b""
        else:
            said += part
    return said


def _end(child: subprocess.Popen[bytes], pid: int) -> None:
    """Let the child end when this process ends, but not when forked children do, which hold the
    pipe too.
    """
    if os.getpid() != pid:
        return
    _tell(child, "")
    try:
        child.communicate(timeout=_FAREWELL_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def libraries(environ: Mapping[str, str]) -> list[str]:
    """Paths where the library may be: beside the mpirun that started this process, or in the
    system.
    """
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    roots = [environ.get("PMIX_PREFIX", ""), environ.get("OPAL_PREFIX", "")]
    roots += [str(Path(mpirun).resolve().parents[1])] if mpirun else []
    found = [
        os.path.join(root, "lib", folder, _NAME)
        for root in dict.fromkeys(roots)
        if root
        for folder in ("", "openmpi")
    ]
    known = ctypes.util.find_library("pmix")
    return [*filter(os.path.exists, found), *([known] if known else []), _NAME]
