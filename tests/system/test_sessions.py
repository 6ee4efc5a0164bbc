"""Workers' sessions, and the share of the processor that these give: what the kernel says of them.

How much the share is in CPU time is measured by benchmarks/sessions.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.system.conftest import OURS, Launch

from rallypoint.launch.agent.guardian import nice_of

pytestmark = [pytest.mark.system, pytest.mark.exact]

DUMP = """
import json, os, sys
group = open("/proc/self/autogroup").read()
with open(f"seen.{os.environ['RANK']}", "w") as file:
    json.dump([os.getsid(0), os.getpid(), os.getpgid(0), int(group.split()[-1])], file)
"""
CPUS = len(os.sched_getaffinity(0))
needs_autogroups = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="this kernel has no autogroups"
)
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="it needs root and setpriv"
)


def seen(
    launch: Launch, workers: int, *, is_privileged: bool = True, wish: str = ""
) -> list[list[int]]:
    script = launch.script(DUMP)
    words = ["--nproc-per-node", str(workers), script]
    environ = {"RALLYPOINT_SESSIONS": wish}
    if is_privileged:
        assert launch.run(*words, environ=environ) == 0, launch.err
    else:
        drop = "import os, sys; os.execvp('setpriv', sys.argv[1:])"
        python = ("-c", drop, "setpriv", "--bounding-set", "-sys_nice", sys.executable, *OURS)
        assert launch.run(*words, environ=environ, launcher=python) == 0, launch.err
    found = [json.loads((launch.directory / f"seen.{i}").read_text()) for i in range(workers)]
    assert all(group == pid for _, pid, group, _ in found)
    assert os.getsid(0) not in {session for session, *_ in found}
    return found


@needs_autogroups
@needs_root
@pytest.mark.parametrize("workers", [2, CPUS + 1])
def test_one_session_with_the_share_of_all(launch: Launch, workers: int) -> None:
    found = seen(launch, workers)
    assert len({session for session, *_ in found}) == 1
    assert {nice for *_, nice in found} == {nice_of(workers)}


@needs_autogroups
@needs_root
@pytest.mark.skipif(CPUS < 2, reason="it needs two CPUs")
def test_without_the_privilege_workers_with_a_core_each_get_a_session_each(launch: Launch) -> None:
    found = seen(launch, 2, is_privileged=False)
    assert [session for session, *_ in found] == [pid for _, pid, *_ in found]
    assert {nice for *_, nice in found} == {0}


@needs_autogroups
@needs_root
def test_without_the_privilege_workers_that_share_cores_share_a_session(launch: Launch) -> None:
    found = seen(launch, CPUS + 1, is_privileged=False)
    assert len({session for session, *_ in found}) == 1
    assert {nice for *_, nice in found} == {0}


@needs_autogroups
def test_a_session_each_on_demand(launch: Launch) -> None:
    found = seen(launch, CPUS + 1, wish="each")
    assert [session for session, *_ in found] == [pid for _, pid, *_ in found]
