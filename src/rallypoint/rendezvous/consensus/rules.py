"""The rules that keep a job one job, each as one small function, so that each can be doubted alone.

`Rules` is what runs. A test for each rule switches it off in a subclass, and demands that simulated
clusters then disagree, or run two groups of workers at one time (tests/simulation/test_rules.py).

Why it holds. An agreement n+1 is decided by a quorum of the voters of n and a quorum of its own.
Two quorums of one list share a voter. So the leader of a higher ballot hears of n+1 from a voter
that accepted it, and proposes the same again; a voter that knows n+1 to be decided votes for no
other n+1. As to time, a coordinator lets members run only until a quorum's newest word is fence_s
old, and a voter makes no promise for longer than that after it heard a coordinator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rallypoint.rendezvous.consensus.messages import NO_BALLOT, Agreement, Ballot, Promise, Setup
from rallypoint.rendezvous.job.round import Member

# All members vote, up to this number; of a longer list the first ones. Ballots stay cheap, and any
# 15 of 31 voters may be lost at one time.
MAX_VOTERS = 31
KEEPER = "keeper"  # the key of a voter that is not an agent: keyvalue/key_value_register.py
BEFORE_ALL = -1  # the number of the agreement on endpoints that the first one follows
_TELL_END_FOR_S = 3.0


class Rules:
    """What voters, candidates, coordinators and members may do."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    # Who decides.

    def voters(self, agreement: Agreement) -> tuple[Member, ...]:
        """The agents that vote on the agreement that follows."""
        if self.setup.quorum == "host" and agreement.number > BEFORE_ALL:
            return tuple([each for each in agreement.members if each.key == agreement.host])
        return agreement.members[:MAX_VOTERS]

    def is_quorum(self, agreement: Agreement, keys: Collection[str]) -> bool:
        """More than half of the voters; or half of them, with the first one."""
        voters = self.voters(agreement)
        count = len([voter for voter in voters if voter.key in keys])
        return 2 * count > len(voters) or (
            bool(voters) and 2 * count == len(voters) and voters[0].key in keys
        )

    def is_decided(self, old: Agreement, new: Agreement, keys: Collection[str]) -> bool:
        """Whether `new`, which follows `old`, is final once these have accepted it."""
        # The last agreement of a list needs no voters of its own: nothing follows it.
        has_new = new.finish is not None or self.is_quorum(new, keys)
        return has_new and self.is_quorum(old, keys)

    def heirs(self, agreement: Agreement) -> tuple[Member, ...]:
        """Which agents may coordinate after this agreement's coordinator; the first try first."""
        return self.voters(agreement)

    # What a voter may do.

    def may_promise(self, ballot: Ballot, promised: Ballot) -> bool:
        """Whether to take part in a ballot, after a promise to take part in none below another."""
        return not ballot < promised

    def may_leave(self, *, heard_for_s: float) -> bool:
        """Whether to turn to another coordinator, this long after hearing the current one."""
        return heard_for_s >= self.setup.fence_s * (1 + self.setup.drift)

    # What a candidate must do.

    def bound_to(self, promises: Iterable[Promise], number: int) -> Agreement | None:
        """What must be proposed as that number: the one accepted in the highest ballot, if any."""
        newest, found = NO_BALLOT, None
        for promise in promises:
            accepted = promise.accepted
            if accepted is not None and accepted.number == number and newest < promise.accepted_in:
                newest, found = promise.accepted_in, accepted
        return found

    # Which node may run workers, and until when.

    def newest_word(
        self, held: Agreement, pending: Agreement | None, heard: Mapping[str, float]
    ) -> float:
        """The latest time whose message a quorum has confirmed to have heard.

        Args:
            held, pending: what was agreed last, and what the coordinator proposes, if anything.
            heard: the latest time that each has confirmed; the coordinator's own is now.
        """
        words = [(heard[each.key], each.key) for each in self.voters(held) if each.key in heard]
        latest_first = sorted(words, reverse=True)
        keys: list[str] = []
        for heard_at, key in latest_first:
            keys.append(key)
            if self.is_quorum(held, keys):
                return heard_at
        return float("-inf")

    def lease_s(self, now: float, quorum_heard_at: float) -> float:
        """For how long after the heartbeat that is answered `now` a member may run workers."""
        return min(self.setup.fence_s, quorum_heard_at + self.setup.fence_s - now)

    def needs_lease(self, *, is_alone: bool) -> bool:
        """Whether workers may run here only within a lease, as others may start theirs without
        this node. They cannot if it is alone in the round: then they need its vote.
        """
        return not is_alone

    def must_fence(self, now: float, lease_until: float) -> bool:
        """Whether a member must end its workers at once."""
        return now >= lease_until

    def heartbeat_after_s(self, heartbeat_s: float, *, unheard_s: float) -> float:
        """When a member sends the next heartbeat, this long after hearing its coordinator."""
        return heartbeat_s

    def must_step_down(self, now: float, quorum_heard_at: float) -> bool:
        """Whether a coordinator no longer has a quorum."""
        return now >= quorum_heard_at + self.setup.fence_s

    def dead_after_s(self) -> float:
        """How long after a member's last answered heartbeat its workers are certainly dead."""
        return self.setup.dead_s

    def taken_over_after_s(self, *, was_lost: bool) -> float:
        """How long after the previous coordinator's end the workers of agents that have not been
        heard since are certainly dead.

        If a voter promised early, because that coordinator's connection closed, the time in which
        it could still answer others must pass as well.
        """
        if was_lost:
            return self.setup.dead_s
        kill_s, drift = self.setup.timeouts.kill_s, self.setup.drift
        return kill_s * (1 + drift) + self.setup.fence_s * drift

    # The end.

    def tell_end_for_s(self) -> float:
        """The longest time that a coordinator waits for the others once the job is over."""
        return self.setup.fence_s

    def why_over(self, why: str) -> str:
        """The reason given where the job ends with the agent that began it, which was lost."""
        return f"{why}; with quorum=host the job ends with it"


class FixedRules(Rules):
    """Those of a job whose nodes are known from the start: node 0 coordinates as long as it lives.

    There is no lease, because no workers are ever started in place of others. So a silent node need
    not end its workers, and a launcher may be stopped for hours (Ctrl-Z, a debugger). Only a
    connection that ended or broke indicates an end (`timeouts.NO_SILENCE`); the driver calls
    `closed` for both. There is no heir (`Setup.quorum` is "host"): a node that loses node 0 gives
    up, and node 0 never steps down.
    """

    def needs_lease(self, *, is_alone: bool) -> bool:
        """Never: without this node there is no other round."""
        return False

    def must_fence(self, now: float, lease_until: float) -> bool:
        return False

    def lease_s(self, now: float, quorum_heard_at: float) -> float:
        return 0.0

    def heartbeat_after_s(self, heartbeat_s: float, *, unheard_s: float) -> float:
        """Less and less often, so that the kernel of a node 0 that is stopped for long can take all
        of it: otherwise the connection would break.
        """
        return max(heartbeat_s, unheard_s / 2)

    def tell_end_for_s(self) -> float:
        """A node that is stopped reads the job's outcome later."""
        return _TELL_END_FOR_S

    def why_over(self, why: str) -> str:
        """Where to look."""
        return (
            f"node 0 at {self.setup.endpoints[0]} was lost: its launcher exited, or the network "
            "is down; check its output"
        )
