"""The pages that follow from other files are those that they would be now."""

from __future__ import annotations

import subprocess
import sys

from tests.pages import ROOT


def test_pages_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts/site/pages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
