"""What a launch says if the system gives it less than it needs: one sentence; nothing is left."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from tests.system.conftest import OURS, Launch

pytestmark = pytest.mark.system

LIMITED = (
    "import os, resource, sys\n"
    "resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]),) * 2)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])\n"
)


@pytest.mark.exact
@pytest.mark.parametrize(
    "limit", [10, pytest.param(12, marks=pytest.mark.everyday(writer="the launcher")), 16]
)
def test_too_few_descriptors(limit: int, launch: Launch) -> None:
    python = ("-c", LIMITED, "RLIMIT_NOFILE", str(limit), *OURS)
    assert launch.run("--nproc-per-node", "4", launch.script(""), launcher=python) == 1
    assert launch.err == (
        f"rallypoint run: the launcher ran out of file descriptors ({limit} here; 4 workers need"
        " about 48): raise the limit with ulimit -n.\n"
    )


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="it needs root and setpriv"
)
@pytest.mark.parametrize("limit", [1, 2])
def test_too_few_processes(limit: int, launch: Launch) -> None:
    """As another user, whom the limit binds, but who may read what root installed."""
    user = 64321  # nobody else's processes count
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    drop += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override", sys.executable]
    python = ("-c", f"import os, sys; os.execvp('setpriv', {drop!r} + sys.argv[1:])")
    limited = (*python, "-c", LIMITED, "RLIMIT_NPROC", str(limit), *OURS)
    environ = {"PYTHONDONTWRITEBYTECODE": "1"}
    words = ("--nproc-per-node", "6", launch.script(""))
    assert launch.run(*words, environ=environ, launcher=limited) == 1
    assert launch.err == (
        "rallypoint run: the launcher cannot start more processes (this user's limit is"
        f" {limit} here, for all processes, and a control group may set a lower one): raise it"
        " with ulimit -u, or end other processes.\n"
    )
