"""The test hosts of the tests, for benchmarks: they are one directory up."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.hosts import Host, Hosts, why_not
from tests.remote_shell import RemoteShell

__all__ = ["Host", "Hosts", "RemoteShell", "why_not"]
