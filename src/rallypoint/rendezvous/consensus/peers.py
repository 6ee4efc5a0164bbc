"""Which agents a coordinator hears, which are silent, and whose lease has certainly expired; which
may join the job, and which have ended.

    heard --no fresh answer for fence_s--> silent --dead_s after its last lease--> lost
      ^                                      |
      +----a heartbeat with a fresh answer---+

A fresh answer repeats one of our stamps: an agent that reaches us without hearing us counts as
silent too. When it counts as lost, its own lease has ended its workers (follower.py).
"""

from __future__ import annotations

from rallypoint.rendezvous.consensus.ballot import Agreements
from rallypoint.rendezvous.consensus.messages import Message, Outbox, Setup
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL, Rules
from rallypoint.rendezvous.job.reports import Join, NodeReport
from rallypoint.rendezvous.job.round import Member


def refusal_reason(ours: Setup, join: Join) -> str:
    """What its user has to change; empty if nothing."""
    limits = ours.limits
    if limits.is_fixed and join.max_nodes != limits.max_nodes:
        return (
            f"--nnodes is {join.max_nodes} here and {limits.max_nodes} on node 0; pass the same "
            "value"
        )
    if limits.is_fixed and join.run_id != ours.run_id:
        return (
            f"the job at {ours.endpoints[0]} is {ours.run_id!r}, not {join.run_id!r}; pass the "
            "same --rdzv-id on all nodes, and each job its own --master-port"
        )
    if join.run_id != ours.run_id:
        return f"the job is {ours.run_id!r}, not {join.run_id!r}; pass the same --rdzv-id"
    if not limits.is_fixed and join.attempt != ours.attempt:
        return (
            f"this node was started for attempt {join.attempt} of the job, which is now in "
            f"attempt {ours.attempt}; end the processes left from the older attempt"
        )
    node_range = (limits.min_nodes, limits.max_nodes)
    if not limits.is_fixed and (join.min_nodes, join.max_nodes) != node_range:
        return (
            f"--nnodes is {limits.min_nodes}:{limits.max_nodes} in the job but"
            f" {join.min_nodes}:{join.max_nodes} on this node; pass the same value"
        )
    return ""


_MOST_KEPT = 1 << 16  # several times as many as a job has members


class EndedAgents(dict[str, None]):
    """Agents known to be dead or gone, by key, which no later process has; the latest are kept.

    Forgetting one is safe: it would only be waited for longer, and no later list of members
    contains it.
    """

    def add(self, key: str) -> None:
        """That agent has ended."""
        self[key] = None
        if len(self) > _MOST_KEPT:
            del self[next(iter(self))]

    def discard(self, key: str) -> None:
        """It was heard again: only a connection had ended."""
        self.pop(key, None)


_NEVER = float("-inf")


class Peer:
    """One agent.

    Attributes:
        member: as it reported; `at` is where it listens.
        heard_at: the latest time of ours that it has confirmed to have heard.
        since: when it joined, or returned, under this ballot.
        sent_at: its clock, when it sent its latest heartbeat under this ballot.
        leased_at: when we last allowed it to run workers; None: not yet under this ballot.
        report: the newest under this ballot; None: none.
        has_beaten: whether anything came from it under this ballot.
        is_over: whether it was notified that the job is over for it.
    """

    def __init__(self, member: Member, now: float) -> None:
        self.member = member
        self.at = member.endpoint
        self.heard_at = _NEVER
        self.since = now
        self.sent_at: float | None = None
        self.leased_at: float | None = None
        self.report: NodeReport | None = None
        self.has_beaten = False
        self.is_silent = False
        self.is_over = False


class Peers:
    """All agents by key, and what a coordinator may allow them: to run until the latest
    confirmation by a quorum is too old.

    Attributes:
        safe_at: when the workers of agents that were never heard under this ballot are certainly
            dead.
    """

    def __init__(
        self,
        setup: Setup,
        rules: Rules,
        agreements: Agreements,
        out: Outbox,
        *,
        was_lost: bool,
        now: float,
    ) -> None:
        """Begin; `was_lost` as in Promise."""
        self.by_key: dict[str, Peer] = {}
        self._setup, self._rules, self._agreements, self._out = setup, rules, agreements, out
        self._was_lost = was_lost
        self._began = now
        # Like Peer.heard_at, of voters that are not peers.
        self._others_heard_at: dict[str, float] = {}
        self._quorum_heard_at: float | None = None  # cached
        self.take_over(now)

    def send(self, key: str, message: Message) -> None:
        """Send that to one of them, or to the sender of the last message."""
        peer = self.by_key.get(key)
        self._out.send(key, None if peer is None else peer.at, message)

    def send_all(self, message: Message) -> None:
        """Send that to each of them."""
        for key in self.by_key:
            self.send(key, message)

    def take_over(self, now: float) -> None:
        """The predecessor's last agreement is decided by now."""
        self.safe_at = now + self._rules.taken_over_after_s(was_lost=self._was_lost)

    def confirms(self, key: str, stamp: float | None, now: float) -> None:
        """An agent has heard our message of that time."""
        peer = self.by_key.get(key)
        if stamp is None or stamp > now:  # it cannot have heard what we have yet to send
            pass
        elif peer is None:
            self._others_heard_at[key] = max(self._others_heard_at.get(key, _NEVER), stamp)
        else:
            peer.heard_at = max(peer.heard_at, stamp)
            peer.is_silent = peer.is_silent and now - peer.heard_at >= self._setup.fence_s
        if peer is None or key in self._agreements.voters:
            self._quorum_heard_at = None

    def changed(self) -> None:
        """The agents have changed, or time has passed."""
        self._quorum_heard_at = None

    def has_quorum(self, now: float) -> bool:
        """Whether enough voters were heard recently for this agent to coordinate."""
        return not self._rules.must_step_down(now, max(self._heard_by_quorum(now), self._began))

    def lease_s(self, peer: Peer, now: float) -> float:
        """For how long after its latest heartbeat a peer may run workers."""
        if peer.is_silent:
            return 0.0
        lease_s = max(0.0, self._rules.lease_s(now, self._heard_by_quorum(now)))
        if lease_s > 0:
            peer.leased_at = now
        return lease_s

    def is_silent(self, peer: Peer, now: float) -> bool:
        """Whether it has not been heard for the fence time."""
        heard_at = max(peer.heard_at, peer.since) if peer.has_beaten else self._began
        return now - heard_at >= self._setup.fence_s

    def dead_at(self, peer: Peer) -> float:
        """When its workers are certainly dead, if it stays silent."""
        if not peer.has_beaten:
            return self.safe_at
        return (peer.leased_at or peer.since) + self._rules.dead_after_s()

    def _heard_by_quorum(self, now: float) -> float:
        """The latest time of ours that a quorum has confirmed to have heard."""
        if self._quorum_heard_at is None:
            self._quorum_heard_at = self._find_heard_by_quorum(now)
        return self._quorum_heard_at

    def _find_heard_by_quorum(self, now: float) -> float:
        held, pending = self._agreements.newest, self._agreements.pending
        if held.number == BEFORE_ALL:
            return self._began
        heard = dict(self._others_heard_at)
        counted = self._agreements.counted(self.by_key)
        heard.update((key, self.by_key[key].heard_at) for key in counted if key in self.by_key)
        heard[self._setup.me.key] = now
        return self._rules.newest_word(held, None if pending is None else pending.agreement, heard)
