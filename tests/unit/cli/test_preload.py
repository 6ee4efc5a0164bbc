"""`--preload`: what it names, where it has no effect, and what `auto` finds in a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rallypoint.cli.options import UsageError
from rallypoint.cli.preload import imports_of, read_preload

PYTHON = (sys.executable, "-u")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import torch\nfrom torch.distributed.fsdp import fully_shard\n")
    return str(path)


def test_names(script: str) -> None:
    command = (*PYTHON, script, "--lr", "1")
    assert read_preload("torch, a.b,torch", command, {}) == (("torch", "a.b"), "")
    assert read_preload("", command, {}) == ((), "")
    assert read_preload("a", (*PYTHON, "-m", "train"), {}) == (("a",), "")
    with pytest.raises(UsageError, match="'a-b' is not a module's name"):
        read_preload("torch,a-b", command, {})


@pytest.mark.parametrize(
    ("command", "environ", "told"),
    [
        (("./train",), {}, "on what is not a Python script or module"),
        (("numactl", "-N", "0"), {}, "on what is not a Python script or module"),
        ((*PYTHON, "-c", "pass"), {}, "on what is not a Python script or module"),
        ((*PYTHON, "-"), {}, "on what is not a Python script or module"),
        ((*PYTHON, "."), {}, "on what is not one Python script"),
        ((*PYTHON, "train_${local_rank}.py"), {}, "on what is not one Python script"),
        (("/x", "-u", "a.py"), {"PYTHON_EXEC": "/x"}, "with PYTHON_EXEC: the workers' Python is"),
        ((*PYTHON, "-m", "a"), {"COVERAGE_PROCESS_START": "c"}, "with COVERAGE_PROCESS_START, wh"),
    ],
)
def test_where_it_has_no_effect(
    command: tuple[str, ...], environ: dict[str, str], told: str
) -> None:
    modules, note = read_preload("torch", command, environ)
    assert not modules
    assert note.startswith(f"--preload has no effect {told}")


def test_auto(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (("torch", "torch.distributed.fsdp"), "")
    assert read_preload("auto", (*PYTHON, script), {}) == found
    monkeypatch.chdir(Path(script).parent)
    assert read_preload("auto", (*PYTHON, "-m", "train"), {}) == found
    nothing = read_preload("auto", (*PYTHON, "-m", "missing"), {})
    assert nothing == ((), "--preload auto cannot read missing")


@pytest.mark.parametrize(
    ("source", "names", "obstacle"),
    [
        ("import numpy as np, os, torch.nn\nimport mine", ("numpy", "torch.nn"), ""),
        ("from .torch import x\nif 1:\n    import torch", (), ""),
        ("import os\nimport torch\nos.environ['A'] = '1'", ("torch",), ""),
        ("import os\nos.environ['A'] = '1'\nimport torch", ("torch",), "uses os.environ before"),
        ("import sys\nsys.path.append('x')\nimport torch", ("torch",), "uses sys.path before"),
        ("from os import environ\nimport torch", ("torch",), "uses os.environ before"),
        (
            "import torch\ndef main():\n    torch.optim.SGD([])",
            ("torch", "torch._dynamo"),
            "",
        ),
        (
            "import torch\nfrom torch.optim import SGD",
            ("torch", "torch.optim", "torch._dynamo"),
            "",
        ),
    ],
)
def test_imports_of_a_script(source: str, names: tuple[str, ...], obstacle: str) -> None:
    found, told = imports_of(source.encode())
    assert found == names
    assert told.startswith(obstacle)
    assert bool(told) == bool(obstacle)
