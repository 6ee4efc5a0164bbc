"""docs/algorithms.md and the guide: every formula is that of the program, every example works."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from rallypoint.schedule.catalogue import ALGORITHMS, Team, build
from rallypoint.schedule.cost.links import Level, Links
from rallypoint.schedule.cost.simulation import Simulation
from rallypoint.schedule.custom import load
from rallypoint.schedule.program import Collective, Program, Send
from rallypoint.schedule.proof.verify import verify

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[3] / "docs"
HOPS = Links("hops", (Level("all", math.inf, 1.0),), slots=64)


def documented() -> list[tuple[Collective, str, str, str, list[str]]]:
    """(collective, algorithm, steps, sent, the other cells) of each row of the tables."""
    rows = []
    for line in (DOCS / "algorithms.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 5 and cells[0] in ALGORITHMS[Collective.ALL_REDUCE]:
            rows.append((Collective.ALL_REDUCE, cells[0], cells[1], cells[2], cells[3:]))
        elif len(cells) == 4 and cells[0].upper() in Collective.__members__:
            rows.append((Collective[cells[0].upper()], cells[1], cells[2], cells[3], []))
    return rows


ROWS = documented()


def test_every_algorithm_is_documented() -> None:
    known = {(c, name) for c in ALGORITHMS if c is not Collective.SEND for name in ALGORITHMS[c]}
    assert {(collective, name) for collective, name, *_ in ROWS} == known


def sent(program: Program) -> float:
    """Blocks that the busiest rank sends, to all receivers together."""
    return max(
        sum(
            each.source.count * len(each.to)
            for lane in program.lanes(rank)
            for each in lane
            if isinstance(each, Send)
        )
        / program.chunks
        for rank in range(program.ranks)
    )


def agrees(formula: str, value: float, ranks: int) -> bool:
    """Whether a cell such as ```2*fl(n)` at most`` holds."""
    match = re.match(r"`([^`]+)`(.*)", formula)
    if match is None:
        return True
    names = {"n": ranks, "lg": lambda n: (n - 1).bit_length(), "fl": lambda n: n.bit_length() - 1}
    result = eval(match[1], {"__builtins__": {}}, names)
    if match[2] == " at most":
        return bool(value <= result)
    if match[2] == " for powers of two" and ranks & (ranks - 1):
        return True
    return bool(value == pytest.approx(result))


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].name.lower()}-{row[1]}")
def test_formulas(row: tuple[Collective, str, str, str, list[str]]) -> None:
    collective, name, steps, blocks, _ = row
    for ranks in range(8, 41):
        program = build(collective, name, ranks=ranks)
        assert agrees(steps, Simulation(program, HOPS).steps, ranks), (ranks, "steps")
        assert agrees(blocks, sent(program), ranks), (ranks, "sent", sent(program))


@pytest.mark.parametrize("row", [row for row in ROWS if row[4]], ids=lambda row: row[1])
def test_properties(row: tuple[Collective, str, str, str, list[str]]) -> None:
    collective, name, _, _, (order, again) = row
    for ranks in (8, 11, 16):
        report = verify(build(collective, name, ranks=ranks))
        holds = {"yes": True, "even n": ranks % 2 == 0, "odd n": ranks % 2 == 1}
        is_in_order = holds.get(order, False)
        assert report.in_rank_order == is_in_order, ranks
        assert report.restartable == (again == "yes"), ranks


def test_example_of_the_guide(tmp_path: Path) -> None:
    text = (DOCS / "guides" / "custom-algorithms.md").read_text()
    code = re.search(r"```python[^\n]*\n(.*?)```", text, re.DOTALL)
    assert code is not None
    file = tmp_path / "star.py"
    file.write_text(code[1])
    for ranks in (1, 2, 5):
        assert load(str(file)).build(Team(ranks)).ranks == ranks
