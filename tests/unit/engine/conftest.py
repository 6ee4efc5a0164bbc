"""Every test that runs ranks runs them on one host, on a host each, and on some."""

from __future__ import annotations

import pytest

from tests.unit.engine import ranks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run_ranks" in vars(metafunc.module):
        metafunc.parametrize("transport", ranks.TRANSPORTS, indirect=True)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen = getattr(request, "param", "shm")
    monkeypatch.setattr(ranks, "chosen_transport", chosen)
    return str(chosen)
