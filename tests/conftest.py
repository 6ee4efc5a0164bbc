"""Shared by all tests: what a missing server or package means."""

from __future__ import annotations

import importlib.util
import os

import pytest

REQUIRE_ALL = os.environ.get("RALLYPOINT_REQUIRE_ALL") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `needs_torch` tests where torch is absent; under RALLYPOINT_REQUIRE_ALL=1 they fail."""
    has_torch = importlib.util.find_spec("torch") is not None
    for item in items:
        if item.get_closest_marker("needs_torch") and not has_torch and not REQUIRE_ALL:
            item.add_marker(pytest.mark.skip(reason="torch is not installed (pip install torch)"))
