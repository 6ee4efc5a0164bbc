"""docs/timeouts.md says what the code does: each row names, in a comment, where its time is."""

from __future__ import annotations

import importlib
import re
from datetime import timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| [^|]+ \| ([^|]+) \| [^|]*\| [^|]+ \| <!-- (\S+) (\S+) -->$")
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}
ROWS = [
    (match[1], match[2], match[3])
    for line in (ROOT / "docs/timeouts.md").read_text().splitlines()
    if (match := ROW.match(line))
]


def seconds_in_code(path: str, name: str) -> float:
    if path.startswith("native/"):
        found = re.search(rf"constexpr \w+ {name}\s*=\s*([0-9.]+)\s*;", (ROOT / path).read_text())
        assert found is not None, name
        scale = 1e-3 if name.endswith("Ms") else 1e-6 if name.endswith("Us") else 1.0
        return float(found[1]) * scale
    module = importlib.import_module("rallypoint." + path.removesuffix(".py").replace("/", "."))
    holder, _, field = name.rpartition(".")
    value = getattr(getattr(module, holder)() if holder else module, field)
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


@pytest.mark.parametrize(("time", "path", "name"), ROWS, ids=[f"{p} {n}" for _, p, n in ROWS])
def test_the_page_has_the_times_of_the_code(time: str, path: str, name: str) -> None:
    found = re.search(r"([0-9.]+) (ms|s|min)\b", time)
    assert found is not None
    assert float(found[1]) * UNITS[found[2]] == pytest.approx(seconds_in_code(path, name))


def test_every_row_is_checked() -> None:
    rows = re.findall(r"^\| (?!Wait)", (ROOT / "docs/timeouts.md").read_text(), re.MULTILINE)
    assert len(rows) == len(ROWS) > 30
