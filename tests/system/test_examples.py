"""The communication examples, each run as its first lines say, with the results that they print."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "communication"
TOLD = {
    "process_information": ["rank 0: host", "rank 3: host", "local rank 3"],
    "two_groups": ["ranks [0, 2] is 2", "ranks [1, 3] is 4"],
    "chain": ["at the end of the chain: [ 1. 11. 21.]"],
    "overlap": ["rank 3: every item is 6, the sum of all ranks"],
    "deadlock": [
        "DeadlockError: ranks wait for each other",
        "rank 1: received [0 0 0] from rank 0",
    ],
    "side_by_side": ["all_reduce: [60. 64. 68.]", " [30. 31. 32.]]"],
    "softmax": ["rank 0: its 251 of 1003 items are right", "rank 3: its 250"],
    "two_sources": ["rank 1: settings [0.1 0.9] from rank 0, weights [0. 1. 2. 3.] from rank 2"],
    "scatter": ["[[  0   1   4]", " [441 484 529]]"],
}


@pytest.mark.parametrize("name", TOLD)
def test_example(launch: Launch, name: str) -> None:
    path = EXAMPLES / f"{name}.py"
    command = next(line for line in path.read_text().splitlines() if "rallypoint run" in line)
    words = command.split()[2:]
    assert words.pop() == f"examples/communication/{name}.py"
    assert launch.run(*words, str(path)) == 0, launch.err
    for text in TOLD[name]:
        assert text in launch.out


def test_every_example_is_tested_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(TOLD)
    listed = (EXAMPLES.parent / "README.md").read_text()
    assert all(f"communication/{name}.py" in listed for name in names)
