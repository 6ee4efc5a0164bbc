"""Which tests are in `make test`, and which in `make test-all` alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.parts import sample, starts_processes

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("one_in", [1, 2, 5, 1000])
def test_a_sample_has_each_value_of_each_parameter(one_in: int) -> None:
    sizes = {"algorithm": 30, "ranks": 5, "transport": 4}
    cases = [
        dict(zip(sizes, values, strict=True))
        for values in itertools.product(*map(range, sizes.values()))
    ]
    names = [f"test[{case}]" for case in cases]
    chosen = sample(names, cases, one_in)
    taken = [case for case, is_in in zip(cases, chosen, strict=True) if is_in]
    for name, size in sizes.items():
        assert {case[name] for case in taken} == set(range(size))
    assert len(cases) / one_in * 0.7 < len(taken) <= len(cases) / one_in * 1.3 + sum(sizes.values())
    assert sample(names, cases, one_in) == chosen


def test_only_jobs_depend_on_when_their_processes_run() -> None:
    assert starts_processes("tests/system/test_launch.py::test_x[tests/unit]")
    assert starts_processes("tests/gpu/test_calls.py::test_x")
    assert not starts_processes("tests/unit/base/test_record.py::test_x[tests/system]")
    assert not starts_processes("tests/simulation/test_clusters.py")


PLANTED = """
import pytest
pytestmark = pytest.mark.long
@pytest.mark.parametrize("b", range(10))
@pytest.mark.parametrize("a", range(10))
@pytest.mark.sampled(one_in=20)
def test_matrix(a, b): pass
"""


@pytest.mark.slow
def test_the_parts_are_all_tests_and_share_none(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    for path in ("unit/test_a.py", "unit/test_b.py", "system/test_c.py"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
    text = PLANTED.replace("pytestmark = pytest.mark.long", "def test_plain(): pass")
    (folder / "unit" / "test_a.py").write_text(text)
    (folder / "unit" / "test_b.py").write_text(PLANTED)
    (folder / "system" / "test_c.py").write_text(
        "import pytest\n@pytest.mark.everyday\ndef test_often(): pass\ndef test_rest(): pass\n"
        "@pytest.mark.seldom\ndef test_seldom(): pass\n"
    )
    for name in ("__init__.py", "conftest.py", "parts.py"):
        (folder / name).symlink_to(ROOT / "tests" / name)
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")

    def collect(*words: str, each_way: str = "") -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "tests", *words]
        environ = {**os.environ, "RALLYPOINT_TEST_EACH_WAY": each_way}
        done = subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True, env=environ
        )
        return {line for line in done.stdout.splitlines() if "::" in line}

    everyday, both = collect("--part", "everyday"), collect()
    all_others, rest = collect("--part", "rest", each_way="1"), collect("--part", "rest")
    assert everyday | all_others == both
    assert not everyday & all_others
    assert len(both) == 204
    assert rest < all_others
    assert all("matrix" in name or "seldom" in name for name in all_others - rest)
    assert not any("seldom" in name for name in rest)
    for name in ("test_a.py", "test_b.py"):
        left, taken = ({each for each in part if name in each} for part in (all_others, rest))
        assert 0.2 * len(left) < len(taken) < 0.5 * len(left)
    assert {name for name in everyday if "matrix" not in name} == {
        "tests/unit/test_a.py::test_plain",
        "tests/system/test_c.py::test_often",
    }
    assert 10 <= sum("test_a.py::test_matrix" in name for name in everyday) <= 25

    # Files of other parts alone are not read, hence a mark must be in the file itself.
    elsewhere = folder / "system" / "test_d.py"
    elsewhere.write_text(
        "import pytest\npytestmark = vars(pytest)['mark'].everyday\ndef test_d(): pass\n"
    )
    assert collect("--part", "everyday") == everyday
    with pytest.raises(subprocess.CalledProcessError) as refused:
        collect("--part", "rest")
    assert "test_d.py: write `pytest.mark.everyday` in this file" in refused.value.stderr
