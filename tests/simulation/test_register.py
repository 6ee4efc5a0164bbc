"""What is above the register holds with an ideal one below it, and needs each of its own rules."""

from __future__ import annotations

import pytest
from tests.simulation.known_seeds import is_needed
from tests.simulation.sim_register import IdealRules, SimRegister
from tests.simulation.sim_story import story
from tests.simulation.sim_witness import ViolationError

MANY_SEEDS = range(6000)
SIZE = 12


@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 200), marks=pytest.mark.long)], ids=str
)
def test_stories_hold(seeds: range) -> None:
    for seed in seeds:
        story(seed, max_size=SIZE, rules=IdealRules, keeper=SimRegister)


class NoFence(IdealRules):
    """Members that hear nobody let their workers run."""

    def must_fence(self, now: float, lease_until: float) -> bool:
        return False


class Impatient(IdealRules):
    """A silent member counts as dead when it falls silent, not when its workers must be dead."""

    def dead_after_s(self) -> float:
        return self.setup.fence_s


class Hasty(IdealRules):
    """A successor does not wait for those whom it does not hear."""

    def taken_over_after_s(self, *, was_lost: bool) -> float:
        return 0.0


class LastsLonger(IdealRules):
    """A coordinator lets members run for longer than its claim is good."""

    def lease_s(self, now: float, quorum_heard_at: float) -> float:
        return self.setup.fence_s


class GrantedEarly(SimRegister):
    """A claim is granted although the last one is still good."""

    def _renew(self, setup: object) -> None:
        self.valid_until = float("-inf")


@pytest.mark.long
@pytest.mark.parametrize("rules", [NoFence, Impatient, Hasty, LastsLonger])
def test_each_rule_is_needed(rules: type[IdealRules]) -> None:
    assert is_needed(
        f"{rules.__name__} SimRegister",
        MANY_SEEDS,
        lambda seed: story(seed, max_size=SIZE, rules=rules, keeper=SimRegister),
        lambda seed: story(seed, max_size=SIZE, rules=IdealRules, keeper=SimRegister),
    )


def test_the_time_of_a_claim_is_needed() -> None:
    with pytest.raises(ViolationError):
        for seed in MANY_SEEDS:
            story(seed, max_size=SIZE, rules=IdealRules, keeper=GrantedEarly)
