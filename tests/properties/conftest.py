"""What runs ranks runs them over shared memory, over TCP, and over both."""

from __future__ import annotations

import pytest
from tests.unit.process_group import ranks

from rallypoint.process_group.formation import connecting


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run_ranks" in vars(metafunc.module):
        metafunc.parametrize("backend", ["shm", "tcp", "two hosts"], indirect=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.be_patient(monkeypatch)


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen = str(getattr(request, "param", "shm"))
    if chosen == "two hosts":
        monkeypatch.setattr(connecting, "host_identity", ranks.make_believe_host)
    monkeypatch.setattr(ranks, "chosen_backend", "rallypoint" if chosen == "two hosts" else chosen)
    return chosen
