"""Every test that runs ranks runs them over shared memory and over TCP."""

from __future__ import annotations

import pytest

from tests.unit.process_group import ranks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run_ranks" in vars(metafunc.module):
        metafunc.parametrize("backend", ["shm", "tcp"], indirect=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.be_patient(monkeypatch)


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen = getattr(request, "param", "shm")
    monkeypatch.setattr(ranks, "chosen_backend", chosen)
    return str(chosen)
