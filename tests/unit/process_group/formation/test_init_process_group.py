"""Wrong calls of init_process_group, and calls before it, are one clear sentence each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.store.local_store import HashStore


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)


X = np.ones(3)


@pytest.mark.parametrize(
    "call",
    [
        dist.get_rank,
        lambda: dist.all_reduce(X),
        dist.barrier,
        lambda: dist.send(X, 0),
        dist.destroy_process_group,
    ],
)
def test_calls_need_a_group(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="has not been initialized") as caught:
        call()
    assert isinstance(caught.value, RuntimeError)  # as torch's is
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "nonesuch"}, "backend='nonesuch'"),
        ({"rank": 99}, "RANK"),
        ({"init_method": "carrier-pigeon://x"}, "carrier-pigeon"),
    ],
)
@pytest.mark.usefixtures("environ")
def test_what_is_wrong_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        dist.init_process_group(**options)
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


def test_one_default_group_at_a_time() -> None:
    dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="already initialized") as caught:
            dist.init_process_group()
        assert isinstance(caught.value, ValueError)
    finally:
        dist.destroy_process_group()
