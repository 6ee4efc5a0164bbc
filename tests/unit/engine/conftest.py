"""Tests that run ranks run them on one host, on a host each, and on some.

What a transport carries are bytes: one for each kind is enough where dtypes are what is tested.
"""

from __future__ import annotations

import pytest

from tests.unit.engine import ranks

TRANSPORTS = {
    "test_collectives": ["shm", "two hosts"],
    "test_communicator": ["shm", "tcp", "two hosts", "read"],
    "test_mailbox": list(ranks.TRANSPORTS),
    "test_memory_of_peers": list(ranks.REACHES),
    "test_work": ["shm", "tcp", "interleaved hosts", "read"],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in TRANSPORTS:
        metafunc.parametrize("transport", TRANSPORTS[name], indirect=True)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen = getattr(request, "param", "shm")
    monkeypatch.setattr(ranks, "chosen_transport", chosen)
    return str(chosen)
