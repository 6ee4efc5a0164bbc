"""Ranks have time to say what they have called."""

from __future__ import annotations

from datetime import timedelta

import pytest

from rallypoint.process_group.groups import accounts


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not get its turn still says what it has called."""
    monkeypatch.setattr(accounts, "_PATIENCE", timedelta(seconds=200))
