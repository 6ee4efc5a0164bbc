"""`progress` in a process of its own, as the memory of its record tells it."""

from __future__ import annotations

import os
import random
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

import rallypoint
from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.base.flight_record import read_steps
from rallypoint.base.memory_file import memory_file
from rallypoint.base.recorded_steps import MOST_LOGGED, RecordedSteps, remaining_s
from rallypoint.base.worker_hook import FLIGHT_RECORD, FLIGHT_RECORD_BYTES, FLIGHT_RECORD_NAME


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = memory_file(FLIGHT_RECORD_NAME, FLIGHT_RECORD_BYTES)
    os.set_inheritable(descriptor, True)
    yield descriptor
    os.close(descriptor)


def steps_after(memory: int, tmp_path: Path, program: str, status: int = 0) -> RecordedSteps | None:
    """What is recorded of a program that has ended, as if a launcher had started it."""
    script = tmp_path / "script.py"
    script.write_text("import rallypoint\n" + textwrap.dedent(program))
    environ = {**os.environ, FLIGHT_RECORD: f"{memory}:0"}
    done = run([sys.executable, str(script)], env=environ, pass_fds=[memory], check=False)
    assert done.returncode == status
    return read_steps(memory, 0)


def test_what_is_told_outlives_sigkill(memory: int, tmp_path: Path) -> None:
    program = """
        import os, signal
        rallypoint.progress(16, 50, loss=4.0)
        rallypoint.progress(17, loss=2.5, accuracy=0.5)
        rallypoint.progress(18)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    found = steps_after(memory, tmp_path, program, status=-9)
    assert found is not None
    assert (found.step, found.total, found.source) == (18, 50, "program")
    assert found.values == {"loss": 2.5, "accuracy": 0.5}
    assert [step for _, step in found.log] == [16, 17, 18]
    assert found.log[-1][0] == pytest.approx(found.at_ns / 1e9, abs=0.01)


def test_neither_numpy_nor_pytorch_is_needed(memory: int, tmp_path: Path) -> None:
    program = """
        import sys
        rallypoint.progress(1)
        assert not {"numpy", "torch"} & sys.modules.keys()
        """
    assert steps_after(memory, tmp_path, program) is not None


def test_the_log_reaches_back_to_the_first_step(memory: int, tmp_path: Path) -> None:
    """As the log that keeps all steps, of which so many are dropped in the end."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    count = random.Random(seed).randrange(20_000)
    found = steps_after(
        memory, tmp_path, f"for step in range({count}): rallypoint.progress(step + 7)"
    )
    stride = 1
    while len(range(0, count, stride)) > MOST_LOGGED:
        stride *= 2
    if count == 0:
        assert found is None
    else:
        assert found is not None
        assert [step for _, step in found.log] == [n + 7 for n in range(0, count, stride)]
        assert list(found.log) == sorted(found.log)


def test_better_sources_replace_others(memory: int, tmp_path: Path) -> None:
    program = """
        from rallypoint.engine.step_record import ELASTIC, OPTIMIZER, record_step
        for _ in range(5): record_step(OPTIMIZER)
        record_step(ELASTIC, 100)
        record_step(OPTIMIZER)
        {}
        record_step(OPTIMIZER)
        """
    found = steps_after(memory, tmp_path, program.format("record_step(ELASTIC, 101)"))
    assert found is not None
    assert (found.step, found.source) == (101, "elastic")
    assert [step for _, step in found.log] == [100, 101]


def test_a_forked_child_writes_nothing_into_its_parents_record(memory: int, tmp_path: Path) -> None:
    program = """
        import os
        rallypoint.progress(3)
        if os.fork() == 0:
            rallypoint.progress(99)
            os._exit(0)
        os.wait()
        """
    found = steps_after(memory, tmp_path, program)
    assert found is not None
    assert found.step == 3


def test_a_template_leaves_its_record_to_its_workers(memory: int, tmp_path: Path) -> None:
    """A module that it preloads may call `progress`."""
    program = """
        import os
        from rallypoint.base import template
        record = os.environ.pop("RALLYPOINT_FLIGHT_RECORD")
        template.is_template = True
        rallypoint.progress(1)
        if os.fork() == 0:
            template.is_template = False
            os.environ["RALLYPOINT_FLIGHT_RECORD"] = record
            rallypoint.progress(2)
            os._exit(0)
        os.wait()
        """
    found = steps_after(memory, tmp_path, program)
    assert found is not None
    assert found.step == 2


def test_without_a_launcher_it_does_nothing() -> None:
    rallypoint.progress(1, 2, loss=0.5)
    rallypoint.progress(0, None, loss=float("nan"))


@pytest.mark.parametrize(
    ("arguments", "values", "says"),
    [
        ((-1,), {}, "step must be from 0"),
        ((2**63,), {}, "step must be from 0"),
        ((1, 0), {}, "total must be positive"),
        ((1, -1), {}, "total must be from 0"),
        ((1, 2**63), {}, "total must be from 0"),
        ((1,), {f"v{n}": 1 for n in range(17)}, "at most 16 values, not 17"),
        ((1,), {"x" * 33: 1}, "more than 32 bytes"),
        ((1,), {"loss": "much"}, "loss must be a number, not 'much'"),
        ((1,), {"loss": [1.0, 2.0]}, "loss must be a number"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: tuple[int, ...], values: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        rallypoint.progress(*arguments, **values)


@pytest.mark.parametrize("wrong", [1.0, float("nan"), "1", True])
def test_steps_are_integers(wrong: Any) -> None:
    with pytest.raises(InvalidTypeError, match="step must be an integer, not"):
        rallypoint.progress(wrong)
    with pytest.raises(InvalidTypeError, match="total must be an integer, not"):
        rallypoint.progress(1, wrong)


def test_a_total_may_be_too_low(memory: int, tmp_path: Path) -> None:
    program = "for step in range(30): rallypoint.progress(step + 1, 20)"
    found = steps_after(memory, tmp_path, program)
    assert found is not None
    assert (found.step, found.total, found.share) == (30, 20, 1.0)
    assert remaining_s([(0.1 * step, step) for step in range(31)], 30, 20) == 0.0
