"""No rule is there for nothing: with any one switched off, the same stories tell of a violation.

Most rules are doubted in whole clusters (test_clusters.py). Leases hide some that only ballots
need, because they keep rivals apart in time; those are doubted in ballots alone (test_ballots.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest
from tests.simulation.known_seeds import is_needed
from tests.simulation.sim_ballots import SimBallots
from tests.simulation.sim_story import size_of, story
from tests.simulation.sim_witness import ViolationError

from rallypoint.rendezvous.consensus.messages import Agreement, Ballot, Promise
from rallypoint.rendezvous.consensus.rules import Rules

SEEDS = range(1000)  # as in test_clusters.py
SMALL = [seed for seed in SEEDS if size_of(seed) <= 12]  # of few nodes, which is faster


class EveryTie(Rules):
    """Any half is a quorum, not only the one with the first member."""

    def is_quorum(self, agreement: Agreement, keys: Collection[str]) -> bool:
        voters = self.voters(agreement)
        return 2 * sum(voter.key in keys for voter in voters) >= len(voters)


class MinIsEnough(Rules):
    """MIN nodes stand in for a quorum."""

    def is_quorum(self, agreement: Agreement, keys: Collection[str]) -> bool:
        count = sum(voter.key in keys for voter in self.voters(agreement))
        return super().is_quorum(agreement, keys) or count >= self.setup.limits.min_nodes


class OldOnly(Rules):
    """The new list need not accept."""

    def is_decided(self, old: Agreement, new: Agreement, keys: Collection[str]) -> bool:
        return self.is_quorum(old, keys)


class NewOnly(Rules):
    """The old list need not accept."""

    def is_decided(self, old: Agreement, new: Agreement, keys: Collection[str]) -> bool:
        return new.finish is not None or self.is_quorum(new, keys)


class NoPromise(Rules):
    """A voter takes part in lower ballots than it promised."""

    def may_promise(self, ballot: Ballot, promised: Ballot) -> bool:
        return True


class Unbound(Rules):
    """A candidate proposes its own, whatever was accepted."""

    def bound_to(self, promises: Iterable[Promise], number: int) -> Agreement | None:
        return None


class Fickle(Rules):
    """A voter turns from a coordinator that lives."""

    def may_leave(self, *, heard_for_s: float) -> bool:
        return True


class NoFence(Rules):
    """Members that hear nobody let their workers run."""

    def must_fence(self, now: float, lease_until: float) -> bool:
        return False


class NoStepDown(Rules):
    """A coordinator without a quorum goes on, and lets others."""

    def must_step_down(self, now: float, quorum_heard_at: float) -> bool:
        return False

    def lease_s(self, now: float, quorum_heard_at: float) -> float:
        return self.setup.fence_s


class Impatient(Rules):
    """A silent member counts as dead when it falls silent, not when its workers must be dead."""

    def dead_after_s(self) -> float:
        return self.setup.fence_s


class Hasty(Rules):
    """A successor does not wait for those whom it does not hear."""

    def taken_over_after_s(self, *, was_lost: bool) -> float:
        return 0.0


class HastyHeir(Rules):
    """A successor waits no longer when it came early, because the connection closed."""

    def taken_over_after_s(self, *, was_lost: bool) -> float:
        return super().taken_over_after_s(was_lost=False)


IN_CLUSTERS = [EveryTie, MinIsEnough, NewOnly, Unbound]
IN_CLUSTERS += [Fickle, NoFence, NoStepDown, Impatient, Hasty, HastyHeir]
IN_BALLOTS = [EveryTie, OldOnly, NewOnly, NoPromise, Unbound]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rules", IN_CLUSTERS)
def test_clusters_need(rules: type[Rules]) -> None:
    assert is_needed(rules.__name__, SMALL, lambda seed: story(seed, rules=rules), story)


@pytest.mark.timeout(600)
def test_clusters_need_new_keys() -> None:
    """An agent that is started again has no vote."""
    assert is_needed("steady keys", SMALL, lambda seed: story(seed, steady_keys=True), story)


@pytest.mark.parametrize("rules", IN_BALLOTS)
def test_ballots_need(rules: type[Rules]) -> None:
    with pytest.raises(ViolationError):
        for seed in SEEDS:
            SimBallots(seed, rules).run(600)
