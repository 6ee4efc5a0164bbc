"""In-place recovery of models on GPUs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests.gpu.conftest import Run

SCRIPT = Path(__file__).parents[1] / "system/torch_elastic.py"
PLACES = ("forward", "first bucket", "last bucket", "after backward", "update", "after update")
RANKS, STEPS = 2, 30


def bits_by_step(directory: Path) -> list[str]:
    """Of the model, the same on all ranks."""
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    told = [(each["step"], each["bits"]) for each in map(json.loads, lines)]
    assert len(set(told)) == STEPS, sorted(set(told))
    return [bits for _, bits in sorted(set(told))]


@pytest.mark.exact
def test_the_bits_are_those_of_a_run_without_kills(run: Run, tmp_path: Path, seed: int) -> None:
    """A spare takes the number of whoever is killed, and computes as that one would have."""
    chance = random.Random(seed)
    steps, places = sorted(chance.sample(range(2, STEPS - 2), 3)), chance.sample(PLACES, 3)
    victims = [chance.randrange(RANKS) for _ in steps]
    plan = [":".join(map(str, each)) for each in zip(steps, victims, places, strict=True)]
    flags = ("--nproc-per-node", str(RANKS), "--spares", "1", "--max-restarts", "10")
    bits = []
    for name, deaths in (("undisturbed", []), ("killed", plan)):
        directory = tmp_path / name
        directory.mkdir()
        done = run(str(SCRIPT), str(directory), "options", str(STEPS), *deaths, flags=flags)
        assert done.returncode == 0, done.stderr
        assert len(list(directory.glob("died-*"))) == len(deaths), done.stderr
        bits.append(bits_by_step(directory))
    assert bits[0] == bits[1], plan
