"""What agents report to their coordinator, and its orders: frozen data, no decisions."""

from __future__ import annotations

from enum import Enum

from rallypoint.base.record import Record
from rallypoint.rendezvous.job.restart_policy import Cause
from rallypoint.rendezvous.job.round import Member, Seat

# What agents report.


class Broken(Record, kw_only=True):
    """A worker of this node failed: the round can no longer succeed."""

    node_rank: int
    round: int
    text: str


class Ended(Record, kw_only=True):
    """The round is over on this node: nothing of it is running, except for `survivors`, and for
    what cannot be killed.

    Attributes:
        survivors: workers that are still running, and go on in the next round.
        ready: workers on standby that can take the places of lost ones.
        newcomers_lost: workers that failed, and had joined others with this round.
        was_cut_off: the node's agent ended its workers, or never started them, because it had lost
            the coordinator: not a failure of theirs.
        because: another reason for which they were cut off, to follow the node's name.
    """

    node_rank: int
    round: int
    succeeded: bool
    causes: tuple[Cause, ...] = ()
    unkillable: int = 0
    was_cut_off: bool = False
    because: str = ""
    survivors: int = 0
    ready: int = 0
    newcomers_lost: int = 0


class Grown(Record, kw_only=True):
    """This node has so many workers on standby for places that are empty in this round."""

    node_rank: int
    round: int
    ready: int


class Finishing(Record, kw_only=True):
    """A worker of this node has done its last update: with a newcomer, all would begin again."""

    node_rank: int
    round: int


class StopAsked(Record, kw_only=True):
    """A signal asked this node's agent to stop the job."""

    node_rank: int
    text: str


class Leave(Record, kw_only=True):
    """This node's agent will leave once its workers have ended; the job goes on."""

    text: str


Report = Broken | Ended | Grown | Finishing | StopAsked | Leave


class Join(Record, kw_only=True):
    """An agent asks to join a job of that name, with that many nodes.

    Attributes:
        last_round: the last one that it knows of; numbers only grow, also under a new coordinator.
        attempt: which start of the job by a scheduler it belongs to.
        job: the key of the agent that began the job that it knows, if any.
        running: the round that still runs there; -1: none.
    """

    run_id: str
    last_round: int
    min_nodes: int
    max_nodes: int
    member: Member
    attempt: int = 0
    job: str = ""
    running: int = -1


# What they are told.


class Outcome(Enum):
    """How a job ends; for a node that never had a place in it, success is MISSED."""

    SUCCEEDED = "succeeded"
    MISSED = "succeeded without this node"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


class Start(Record, kw_only=True):
    """Start the workers of this seat in a round, or tell those that go on.

    Attributes:
        because: why there is a new round.
        is_urgent: somebody was lost, or contact; otherwise, those who go on end the round before
            when they come to a point where they can.
        may_replace: new workers may be started in place of those that were lost.
        keeps: workers that still run on this node may take its places. Otherwise they were not
            counted: others have gone on without them, and they are of no use any more.
    """

    seat: Seat
    because: str = ""
    is_urgent: bool = True
    may_replace: bool = False
    keeps: bool = True


class Stop(Record, kw_only=True):
    """End the workers of this round.

    Attributes:
        at_once: by SIGKILL, as others may soon replace them.
        may_pause: instead, those that go on when others are lost may be paused until they have a
            place in the next round, or are to end after all.
        admits: others wait to join them; nothing is wrong with the round.
    """

    round: int
    because: str
    at_once: bool = False
    may_pause: bool = False
    admits: bool = False


class Finish(Record, kw_only=True):
    """The job is over. The node `culprit`, if any, reports what went wrong first (`what`) in full.

    Attributes:
        was_cut_off: only for this node, which was refused, or cannot continue without another.
    """

    outcome: Outcome
    because: str
    culprit: int | None = None
    what: str = ""
    was_cut_off: bool = False


Order = Start | Stop | Finish


class Notice(Record):
    """Tell the user why nothing happens."""

    text: str


class Refuse(Record):
    """Tell an agent that it cannot take part."""

    key: str
    why: str
