"""What is asked of a PyTorch of another version, with stand-ins for those that are not here."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from rallypoint.base.errors import HostError  # noqa: E402
from rallypoint.pytorch import versions  # noqa: E402

c10d: Any = torch._C._distributed_c10d
pytestmark = pytest.mark.needs_torch


def test_an_older_one_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "c10d", types.SimpleNamespace(AllreduceOptions=object))
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    with pytest.raises(HostError, match=r"PyTorch 2\.7\.1 is too old .* needs 2\.8 or newer"):
        versions.check.__wrapped__()


@pytest.mark.parametrize(
    ("version", "is_told"), [("2.8.0+cu128", False), ("2.16.0", True), ("3.0.0a0+git1", True)]
)
def test_a_newer_one_is_told_of_and_used(
    version: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.check.__wrapped__()
    assert [version in str(each.message) for each in caught] == [True] * is_told


def test_the_factor_of_premul_sum() -> None:
    op = torch.distributed._make_nccl_premul_sum(2.5)
    assert versions.factor_of(op) == 2.5
    before = types.SimpleNamespace(__getstate__=op.__getstate__)
    assert versions.factor_of(before) == 2.5


def test_methods_are_found_by_the_names_before() -> None:
    before = types.SimpleNamespace(_allgather_base="before")
    now = types.SimpleNamespace(all_gather_single="now", _allgather_base="before")
    assert versions.method_of(before, "all_gather_single") == "before"
    assert versions.method_of(now, "all_gather_single") == "now"
