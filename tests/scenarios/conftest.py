"""Scenarios are golden text: what is done to a cluster, and all that it then does.

After a deliberate change, `pytest tests/scenarios --write-scenarios` writes them anew; read the
difference as carefully as the change.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-scenarios", action="store_true", help="write golden text anew")
