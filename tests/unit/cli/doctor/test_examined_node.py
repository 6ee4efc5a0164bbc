"""One node of an examination, on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rallypoint.base.json_records import to_json
from rallypoint.cli.doctor import examined_node as node_module
from rallypoint.cli.doctor.doctor_flags import DoctorRequest
from rallypoint.cli.doctor.examined_node import ExaminedNode
from rallypoint.cli.doctor.examiner import look_order
from rallypoint.doctor.cluster_facts import PathLook, PathState
from rallypoint.doctor.collect import LookOrder


def test_a_working_directory_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not entered, which could take for ever; what lies below it is not examined."""

    def hang(path: str) -> PathLook:
        return PathLook(path=path, state=PathState.HANGS)

    monkeypatch.setattr(node_module, "look_at_path", hang)
    monkeypatch.setattr(os, "chdir", lambda _: pytest.fail("it was entered"))
    look = LookOrder(
        paths=("data", str(tmp_path)), script="train.py", log_dir="logs", directory="/hung"
    )
    order = look_order(DoctorRequest(look=look), 0, "", endpoints=(), secret="")
    answer = ExaminedNode().perform({"do": "look", "order": to_json(order)})
    paths = [(each["path"], each["state"]) for each in answer["facts"]["paths"]]
    assert paths == [(str(tmp_path), "GOOD"), ("/hung", "HANGS")]
