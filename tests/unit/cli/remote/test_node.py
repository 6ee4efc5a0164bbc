"""What node.py finds on its host before a launcher starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.cli.remote.node import _look


def look(directory: Path, script: str) -> str:
    held, found = _look({"directory": str(directory), "script": script, "port_range": ""})
    if held is not None:
        held.close()
    return str(found.get("error", ""))


def test_directory_and_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it is left there
    (tmp_path / "train.py").touch()
    assert look(tmp_path, "train.py") == ""
    assert look(tmp_path, "") == ""
    assert look(tmp_path, "other.py").startswith(f"there is no other.py in {tmp_path} there; ")
    assert look(tmp_path / "x", "train.py").startswith(f"cannot work in {tmp_path}/x there (No ")
