"""Whom a coordinator hears, how long ago, and what they were told: one record for each agent.

    silent ----fence_s without an answer to what we said----> lost, dead_s after we last said
       ^                                                      that it may run workers
       +--- a beat that answers something fresh brings it back

What counts is the way there and back: an agent that reaches us without hearing us is silent, too.
"""

from __future__ import annotations

from rallypoint.rendezvous.round import Endpoint, Member


class Peer:
    """One agent.

    Attributes:
        member: as it said; `at` is where it listens.
        heard_at: the newest time of ours that it has confirmed to have heard.
        since: when it came, or came back, under this ballot.
        sent_at: its clock, when it sent its newest beat under this ballot.
        leased_at: when we last allowed it to run workers; None: not yet under this ballot.
        round: what runs there, as it said.
        seen: how many of its reports have come.
        has_beaten: whether anything came from it under this ballot.
        is_over: whether it was told that the job is over for it.
    """

    __slots__ = (
        "at",
        "has_beaten",
        "heard_at",
        "is_over",
        "is_silent",
        "leased_at",
        "member",
        "round",
        "seen",
        "sent_at",
        "since",
    )

    def __init__(self, member: Member, now: float) -> None:
        self.member = member
        self.at = Endpoint(host=member.address, port=member.port)
        self.heard_at = float("-inf")
        self.since = now
        self.sent_at: float | None = None
        self.leased_at: float | None = None
        self.round = -1
        self.seen = 0
        self.has_beaten = False
        self.is_silent = False
        self.is_over = False

    def confirms(self, stamp: float | None, now: float, fence_s: float) -> None:
        """It has heard what we said at that time of ours."""
        if stamp is None or stamp > now:
            return
        self.heard_at = max(self.heard_at, stamp)
        if now - self.heard_at < fence_s:
            self.is_silent = False
