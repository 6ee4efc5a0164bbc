"""Which processes are on one host, or on one machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from rallypoint.base import files
from rallypoint.base.files import host_identity, machine_of


def test_a_process_without_descriptors_is_on_no_other_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identity = host_identity()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            host_identity()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert host_identity() == identity
    monkeypatch.setattr(files, "BOOT_ID", "/missing")  # there is no /proc
    assert host_identity() == os.uname().nodename


def test_processes_of_one_host_have_one_identity() -> None:
    """tests/system/test_hosts.py has those of several."""
    code = "from rallypoint.base.files import host_identity; print(host_identity())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == host_identity() + "\n"


def test_hosts_of_one_kernel_are_on_one_machine() -> None:
    ask = "from rallypoint.base.files import host_identity; print(host_identity())"
    there = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        check=False,
    )
    if there.returncode:
        pytest.skip(f"needs user namespaces: {there.stderr.strip()}")
    identity = there.stdout.strip()
    assert identity != host_identity()
    assert machine_of(identity) == machine_of(host_identity())
