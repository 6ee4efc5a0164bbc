"""Ranks die at named points of updates and recoveries, and the others stay of one state."""

from __future__ import annotations

import json
import os
import random
from collections import Counter

import pytest
from tests.system import kill_points
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.test_in_place import (
    await_step,
    begin,
    bits_of,
    check_steps,
    end,
    replayed,
    steps_of,
)

pytestmark = pytest.mark.system

CASES = int(os.environ.get("RALLYPOINT_TEST_KILL_POINTS", "20"))
WEIGHTS = "shape=4096"  # several pieces of state

# Flags; the fewest ranks that go on; and how many of the cases. Two ranks may die in a case, so one
# of three always has the state.
SPARES = (["--nproc-per-node", "3", "--spares", "2"], 3, CASES // 2)
JOINS = (["--nproc-per-node", "4"], 3, CASES - CASES // 2)


@pytest.mark.exact
@pytest.mark.timeout(300 + 5 * CASES)
@pytest.mark.parametrize(("flags", "least", "cases"), [SPARES, JOINS], ids=["spares", "joins"])
def test_all_have_one_history(
    launch: Launch,
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    flags: list[str],
    least: int,
    cases: int,
) -> None:
    """The bits of each step are those of a run by as many ranks, none of which dies."""
    plan = kill_points.draw(random.Random(seed), cases, turns=least, gap=5)
    print(json.dumps(plan))
    kill_points.write(plan, launch.directory)
    wishes = f"kills until min_size={least} {WEIGHTS}"
    begin(launch, *flags, "--max-restarts", "1000", steps=1_000_000, wishes=wishes)
    all_died = {step: len(deaths) for step, deaths in plan.items()}

    def have_died() -> bool:
        assert launch.process is not None
        assert launch.process.poll() is None, launch.err
        return kill_points.deaths(launch.directory) == all_died

    wait_until(have_died, within_s=120 + 5 * cases)
    told = max(steps_of(launch.directory), default=0)
    await_step(launch.directory, told + 20, least)
    (launch.directory / "enough").touch()
    end(launch)
    print(Counter(death.point for deaths in plan.values() for death in deaths))
    found = steps_of(launch.directory)
    check_steps(found, len(found))
    print("sizes", Counter(told[0].size for told in found.values()))
    assert bits_of(found) == replayed(found, tmp_path_factory.mktemp("replay"), WEIGHTS)


@pytest.mark.exact
@pytest.mark.parametrize("point", [kill_points.MEMBERS, "in send"])
def test_the_only_one_that_has_the_state_dies(launch: Launch, point: str) -> None:
    """While two spares meet it, or get the state from it: nobody goes on with half of one."""
    plan = {20: [kill_points.Death("reduce"), kill_points.Death(point)]}
    kill_points.write(plan, launch.directory)
    flags = ("--nproc-per-node", "2", "--spares", "2")
    begin(launch, *flags, steps=200, wishes=f"kills min_size=2 {WEIGHTS}")
    end(launch, status=1)
    assert kill_points.deaths(launch.directory) == {20: 2}
    assert "StateLostError: all ranks that had the state were lost" in launch.err
    found = steps_of(launch.directory)
    assert sorted(found) == list(range(1, 21)), "the training has not begun anew"
