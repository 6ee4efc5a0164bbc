"""Figures: those of the performance page and the README are the records', and those of transcribed
records are on the dated page that they name. (That the pages are as their program writes them is
test_generated_pages.py's.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pages import ROOT

RECORDS = sorted((ROOT / "docs" / "measurements").glob("*.json"))
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "MiB": 1.0}
COUNTS = ("trials", "stuck", "workers", "ranks", "bytes", "count", "wrong")


def load(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def figures(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of all that was measured in rows, at any depth."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from figures(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from figures(each, name)
    elif isinstance(value, int | float) and name not in COUNTS:
        yield name, float(value)


def is_near(one: float, other: float, digits: int = 3) -> bool:
    return abs(one - other) <= 0.5 * 0.1 ** (digits - 1) * max(one, other)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_says_when_how_and_where(path: Path) -> None:
    record = load(path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert "rallypoint bench " in record["command"] or "python benchmarks/" in record["command"]
    assert record.get("place") or record["machine"]["cpu"]
    assert list(figures(record["rows"]))


@pytest.mark.parametrize(
    "path",
    [path for path in RECORDS if "transcribed_from" in load(path)],
    ids=lambda path: path.stem,
)
def test_transcribed_figures_are_on_their_page(path: Path) -> None:
    record = load(path)
    page = (path.parent / record["transcribed_from"]).read_text(encoding="utf-8")
    shown = {float(number.replace(",", "")) for number in NUMBER.findall(page)}
    for name, value in figures(record["rows"]):
        scaled = (value, value * 1e3, value * 1e6)  # s as ms or us
        assert any(is_near(each, one, 6) for each in scaled for one in shown if one), (name, value)


def test_the_table_of_operations_is_the_records() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    table = page.partition("## All operations")[2].partition("## ")[0]
    rows = re.findall(r"^\| ([a-z_]+) \|(.*)\|$", table, re.MULTILINE)
    assert len(rows) == 10
    for operation, cells in rows:
        found = load(ROOT / f"docs/measurements/{operation}_2.json")["rows"]
        times = [
            {name: result["time_us"] for name, result in row["results"].items()} for row in found
        ]
        for cell in filter(str.strip, cells.split("|")):
            ours, peer = (float(each.replace(",", "")) for each in cell.rstrip(" *").split("/"))
            assert any(
                is_near(row["rallypoint"], ours) and is_near(fastest(row), peer) for row in times
            ), (operation, cell)
            assert cell.strip().endswith("*") == (peer < ours), (operation, cell)


def fastest(row: dict[str, float]) -> float:
    return min(time for name, time in row.items() if name != "rallypoint")


def measured_in(text: str) -> list[tuple[float, str]]:
    """(number, unit) of all durations and memory in a text."""
    return [
        (float(number), unit)
        for number, unit in re.findall(r"(?<![\w.])(\d+(?:\.\d+)?) (us|ms|s|MiB)\b", text)
    ]


def test_durations_of_both_pages_are_in_records() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8").partition("\n## ")[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("<!-- figures, ")[2].partition("<!-- end of figures -->")[0]
    scale = {"us": 1e-6, "ms": 1e-3}
    known = [
        # "rallypoint" and "gloo": seconds, in what benchmarks/ddp.py writes
        value * scale.get(name.rpartition("_")[2], 1.0)
        for path in RECORDS
        for name, value in figures(load(path)["rows"])
    ]
    found = measured_in(page) + measured_in(table)
    assert len(found) > 15
    for number, unit in found:
        assert any(is_near(number * UNITS[unit], each) for each in known), f"{number} {unit}"


def test_the_page_is_short() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert sum(any(c.isalnum() for c in word) for word in page.split()) <= 700
