"""Ranks that do not get their turn are waited for."""

from __future__ import annotations

import pytest

from tests.unit.process_group.ranks import be_patient


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
