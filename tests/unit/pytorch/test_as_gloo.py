"""What is asked for instead of gloo; and that nothing changes unless it is wished."""

from __future__ import annotations

import pytest

from rallypoint.pytorch.as_gloo import install, ours_for


@pytest.mark.parametrize(
    ("asked", "devices", "ours"),
    [
        ("gloo", "cpu:gloo,cuda:gloo", "rallypoint"),
        ("undefined", "cpu:gloo", "cpu:rallypoint"),
        ("undefined", "cuda:nccl", None),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:rallypoint,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:gloo", "cuda:nccl,cpu:rallypoint"),
        ("cpu:gloo", "cpu:gloo", "cpu:rallypoint"),
        ("nccl", "cuda:nccl", None),
        ("rallypoint", "cpu:rallypoint", None),
        ("torch_gloo", "cpu:torch_gloo", None),
    ],
)
def test_gloo_is_replaced_on_each_device(asked: str, devices: str, ours: str | None) -> None:
    assert ours_for(asked, devices) == ours


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    ("value", "told"),
    [("", ""), ("0", ""), ("yes", "RALLYPOINT_AS_GLOO='yes' must be 0 or 1; gloo stays PyTorch's")],
)
def test_other_values_change_nothing(
    value: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch.distributed.distributed_c10d as c10d

    before = c10d._new_process_group_helper
    monkeypatch.setenv("RALLYPOINT_AS_GLOO", value)
    install()
    assert c10d._new_process_group_helper is before
    assert told in capsys.readouterr().err


@pytest.mark.needs_torch
def test_a_torch_without_that_function_is_told_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch.distributed.distributed_c10d as c10d

    def other(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(c10d, "_new_process_group_helper", other)
    monkeypatch.setenv("RALLYPOINT_AS_GLOO", "1")
    install()
    assert c10d._new_process_group_helper is other
    assert "has no effect with this version of PyTorch" in capsys.readouterr().err
