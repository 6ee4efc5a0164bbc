"""One agent's part in a job that no single agent can lose: facts and `now` in, actions out.

    SEEKING ---an endpoint answers---------> FOLLOWING ---its coordinator is lost--> CAMPAIGNING
       |  ^                                      ^   (only voters; others: SEEKING)     |   |
       |  +--nobody to follow, no vote-----------+----------another one won-------------+   |
       +--at the endpoint, with a quorum of endpoints--> LEADING <---a quorum promised------+
    any of them ---the job is over, or this agent left---> DONE

What a voter may promise is voter.py's, how long anyone may run workers lease.py's, the coordinator's
part lead.py's, and the job itself coordinator.py's. No socket, clock or process here.
"""

from __future__ import annotations

from enum import Enum
from random import Random

from rallypoint.rendezvous.coordinator import Report
from rallypoint.rendezvous.protocol import Decision, Message, Setup
from rallypoint.rendezvous.round import Endpoint


class Part(Enum):
    """What the agent does for the agreement."""

    SEEKING = "seeking"
    FOLLOWING = "following"
    CAMPAIGNING = "campaigning"
    LEADING = "leading"
    DONE = "done"


class Participant:
    """One agent. Each method takes one event and gives one `Decision`.

    Attributes:
        part: what it does now.
        wake_at: when to call `tick` at the latest; None: only events matter.
        waiting: how many nodes wait for the next round.
        round: the one whose workers run here; -1: none.
    """

    part: Part
    wake_at: float | None
    waiting: int
    round: int

    def __init__(self, setup: Setup, random: Random) -> None:
        raise NotImplementedError

    def started(self, now: float) -> Decision:
        """The driver listens: look for the others."""
        raise NotImplementedError

    def received(self, sender: str, message: Message, now: float) -> Decision:
        """The agent with that key says this; drivers have checked its key and the job's token."""
        raise NotImplementedError

    def closed(self, key: str, why: str, now: float) -> Decision:
        """That agent has ended: its connection closed, or another one answers at its address.

        Not to be told of a connection that could not be made, or that only fell silent.
        """
        raise NotImplementedError

    def unreachable(self, at: Endpoint, why: str, now: float) -> Decision:
        """A `Call` found nobody."""
        raise NotImplementedError

    def reported(self, report: Report, now: float) -> Decision:
        """This node's workers, or a signal: StopAsked ends the job, Leave only this node's part."""
        raise NotImplementedError

    def store_opened(self, round_number: int, store: Endpoint, now: float) -> Decision:
        """What `OpenStore` asked for is there."""
        raise NotImplementedError

    def tick(self, now: float) -> Decision:
        """Time has passed."""
        raise NotImplementedError
