"""The examples that need no PyTorch, each run as its first lines say, with the results they print.

Those that do are in test_examples_torch.py, those of Slurm and Kubernetes in the tests of these.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import ROOT, blocks_tested_by
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.test_pages import not_printed

pytestmark = pytest.mark.system

EXAMPLES = ROOT / "examples"
SHOWN = {
    command[-1]: block
    for block in blocks_tested_by("tests/system/test_examples.py::test_gallery")
    for command in block.commands()
}


def commands_of(path: Path) -> list[list[str]]:
    """What an example's first lines say to type, with the example's whole path."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    relative = f"examples/{path.relative_to(EXAMPLES)}"
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line.replace(relative, str(path))) for line in lines if relative in line]


def words_of(path: Path, number: int = 0) -> list[str]:
    """The arguments of its command that starts with `rallypoint run`."""
    command = commands_of(path)[number]
    assert command[:2] == ["rallypoint", "run"]
    return command[2:]


FIRST, *OTHERS = SHOWN


@pytest.mark.parametrize("name", [pytest.param(FIRST, marks=pytest.mark.everyday), *OTHERS])
def test_gallery(launch: Launch, name: str) -> None:
    """It prints what docs/guides/gallery.md shows, with the command that its first lines give."""
    if name.startswith("examples/train_"):
        pytest.importorskip("sklearn")
    if name.endswith("_ddp.py"):
        pytest.importorskip("torch")
    command, *printed = SHOWN[name].text.splitlines()
    path = ROOT / name
    assert shlex.split(command.replace(name, str(path)))[1:] in commands_of(path)
    assert launch.run(*words_of(path)) == 0, launch.err
    assert not not_printed("\n".join(printed), launch.out), launch.out


def accuracies(text: str) -> list[float]:
    """On images that were not trained with; a guess is right once in ten times."""
    return [float(number) for number in re.findall(r"test accuracy ([0-9.]+)", text)]


@pytest.mark.exact
def test_an_algorithm_of_ones_own_trains(launch: Launch) -> None:
    """What a reader does with star.py beyond running it; the result is that of the built-in one."""
    star = f"{EXAMPLES}/algorithms/star.py:star"
    words = ["--nproc-per-node", "2", str(EXAMPLES / "train_digits.py"), "--epochs", "2"]
    told = []
    for environ in ({}, {"RALLYPOINT_ALGORITHM": star}):
        assert launch.run(*words, environ=environ) == 0, launch.err
        told.append(re.findall(r"loss [0-9.]+|test accuracy [0-9.]+", launch.out))
    assert len(told[0]) == 3
    assert told[0] == told[1]


def test_parameter_server(launch: Launch) -> None:
    pytest.importorskip("sklearn")
    assert launch.run(*words_of(EXAMPLES / "parameter_server.py")) == 0, launch.err
    assert "took 200 from rank 1, 200 from rank 2, 200 from rank 3" in launch.out
    assert accuracies(launch.out)[-1] > 0.9


def test_digits_in_place(launch: Launch) -> None:
    """With a worker killed on the way, the accuracy is that of a run without."""
    pytest.importorskip("sklearn")
    words = [*words_of(EXAMPLES / "train_digits_in_place.py"), "--epochs", "4"]
    once = {"PET_PRELOAD": "sklearn.datasets"}
    assert launch.run(*words, environ=once) == 0, launch.err
    expected = accuracies(launch.out)
    process = launch.start(*words, "--pause", "0.01", environ=once)
    begins = re.compile(r"process (\d+), begins after step 0")
    wait_until(lambda: begins.search(launch.out))
    begun = begins.findall(launch.out)
    os.kill(int(begun[0]), signal.SIGKILL)
    assert process.wait(100) == 0, launch.err
    assert accuracies(launch.out) == expected
    assert expected[0] > 0.9
    # The spare takes the place at once, or joins as soon as it is ready.
    loss = rf"\(pid {begun[0]}\) was killed by SIGKILL; "
    told = (
        "(a spare took over; ranks 0-3 of 4|3 of 4 ranks are left; ranks 0-2 of 3) continue after"
    )
    assert re.search(loss + told, launch.err), launch.err


@pytest.mark.parametrize("is_file", [pytest.param(True, marks=pytest.mark.seldom), False])
def test_notebook(tmp_path: Path, is_file: bool) -> None:
    """As a program, and from a main module without a file, which is what a notebook has."""
    pytest.importorskip("sklearn")
    path = EXAMPLES / "notebook.py"
    assert commands_of(path) == [["python", str(path)]]
    done = subprocess.run(
        [sys.executable, *([str(path)] if is_file else ["-"])],
        input=path.read_text(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert accuracies(done.stdout)[-1] > 0.85


@pytest.mark.everyday
def test_every_example_is_tested_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    tested = {*re.findall(r'"([\w/.-]+\.(?:py|yaml|sbatch))"', tests)}
    tested |= set(SHOWN)
    names = {path.name for path in map(Path, tested)}
    for path in EXAMPLES.rglob("*.*"):
        if path.suffix in (".py", ".yaml", ".sbatch"):
            assert f"({path.relative_to(EXAMPLES)})" in listed, path
            assert path.name in names, path
