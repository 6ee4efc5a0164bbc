"""What agents report to their coordinator, and its orders; and the decision, which holds what a
pure state machine here returns for an event. Frozen data.
"""

from __future__ import annotations

from enum import Enum

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.rendezvous.job.round import Member, Seat

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from typing import Generic, Never, NoReturn, TypeVar

    Action_co = TypeVar("Action_co", bound=Record, covariant=True)
    Other = TypeVar("Other", bound=Record)
else:
    Action_co = None

    class Generic:
        """A word to type checkers only."""

        __slots__ = ()
        __class_getitem__ = classmethod(lambda cls, _: cls)


# What agents report.


class RankFailure(Record, kw_only=True):
    """One worker's failure, in a line.

    Attributes:
        is_charged: it belongs to the loss that ended the round before.
        is_newcomer: it had joined others, which continued, with this round.
    """

    rank: int
    node_rank: int
    text: str
    is_secondary: bool = False
    is_startup: bool = False
    is_charged: bool = False
    is_newcomer: bool = False


class NodeReport(Record, kw_only=True):
    """An agent's complete report of its node: each heartbeat repeats it.

    Attributes:
        round: the newest one that began here, or that never will; -1: none.
        has_begun: whether it did.
        is_over: nothing of it is running, except for `survivors`, and for what cannot be killed.
        broken: why it can no longer succeed: a worker failed, or cannot reach others; not set once
            the node's own agent was asked to stop.
        is_finishing: a worker has done its last update: with a newcomer, all would start over.
        ready: workers on standby that can take empty places.
        survivors: workers of a round that is over that continue in the next one.
        waits: they, or workers on standby, wait for it.
        succeeded, causes, unkillable: how it ended.
        was_cut_off: the agent ended its workers, or never started them, because it had lost the
            coordinator: not a failure of theirs.
        because: another reason for which they were cut off, to follow the node's name.
        stop_asked: a signal, in words, asked this agent to stop the job.
        leaves: why this agent leaves once its workers have ended; the job continues.
    """

    round: int = -1
    has_begun: bool = False
    is_over: bool = True
    broken: str = ""
    is_finishing: bool = False
    ready: int = 0
    survivors: int = 0
    waits: bool = False
    succeeded: bool = False
    causes: tuple[RankFailure, ...] = ()
    unkillable: int = 0
    was_cut_off: bool = False
    because: str = ""
    stop_asked: str = ""
    leaves: str = ""

    def __post_init__(self) -> None:
        if self.round < -1 or min(self.ready, self.survivors, self.unkillable) < 0:
            raise InvalidArgumentError(f"a node reports a negative number: {self!r:.200}.")

    @property
    def running(self) -> int:
        """The round that runs there; -1: none."""
        return -1 if self.is_over else self.round

    def without(self, number: int) -> NodeReport:
        """The same workers, if that round did not begin there."""
        return NodeReport(
            round=number,
            ready=self.ready,
            survivors=self.survivors,
            stop_asked=self.stop_asked,
            leaves=self.leaves,
        )


class Join(Record, kw_only=True):
    """An agent asks to join a job of that name, with that many nodes.

    Attributes:
        report: of its newest round; numbers only grow, also under a new coordinator.
        attempt: which start of the job by a scheduler it belongs to.
        job: the key of the agent that began the job that it knows, if any.
    """

    run_id: str
    report: NodeReport
    min_nodes: int
    max_nodes: int
    member: Member
    attempt: int = 0
    job: str = ""


# Orders to agents.


class Outcome(Enum):
    """How a job ends; for a node that never had a place in it, success is MISSED."""

    SUCCEEDED = "succeeded"
    MISSED = "succeeded without this node"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


class Start(Record, kw_only=True):
    """Start the workers of this seat in a round, or send their places to those that continue.

    Attributes:
        because: why there is a new round.
        is_urgent: a worker or the contact was lost; otherwise, the workers that continue end the
            round before at a point where they can.
        may_replace: new workers may be started in place of those that were lost.
        keeps: whether the round was formed with the workers that still run on this node; if not,
            they must end, as the others have continued without them.
    """

    seat: Seat
    because: str = ""
    is_urgent: bool = True
    may_replace: bool = False
    keeps: bool = True


class Ending(Enum):
    """How workers are ended, if they do not continue in the next round.

    ADMIT: nothing is wrong, others wait to join them. Not if some have done their last update.
    PAUSE: at once, but those that can continue are paused until they have a place, or are to end.
    """

    TERMINATE = "terminate"
    ADMIT = "admit"
    PAUSE = "pause"
    KILL = "kill"


class Stop(Record, kw_only=True):
    """End the workers of this round."""

    round: int
    because: str
    ending: Ending = Ending.TERMINATE


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


# What a state machine returns.


class Decision(Record, Generic[Action_co]):
    """Actions for the driver, in this order; an empty reason: nothing worth reporting happened.

    `Action_co` is the union of the actions of a state machine: its driver performs each.
    """

    actions: tuple[Action_co, ...] = ()
    reason: str = ""

    def __add__(self, then: Decision[Other]) -> Decision[Action_co | Other]:
        """Both, one after the other."""
        reasons = [text for text in (self.reason, then.reason) if text]
        return Decision(self.actions + then.actions, "; ".join(reasons))


NOTHING: Decision[Never] = Decision()


def assert_never(action: Never) -> NoReturn:
    """The last case of a driver: mypy accepts it only if each action, or order, has one."""
    raise AssertionError(f"no code performs {action!r}")
