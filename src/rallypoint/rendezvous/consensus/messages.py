"""The messages between the agents of a job, and the requests to their drivers.

    member -> coordinator    Join, Heartbeat       Ack, Go, Halt, Over, Unknown    <- coordinator
    candidate -> voters      Prepare, Propose      Promise, Accepted, Refused      <- voters
    anyone -> anyone         Led: who coordinates

Every message can be lost, repeated or late: each heartbeat repeats what matters. Times in messages
are from the sender's clock, and are only used when they return to it. Frozen data; no decisions
here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.reports import (
    Decision,
    Finish,
    Join,
    NodeReport,
    Notice,
    Refuse,
    Start,
    Stop,
)
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.timeouts import Timeouts


class Ballot(Record):
    """An attempt to lead: the higher term counts, then the candidate's key."""

    term: int
    candidate: str

    def __post_init__(self) -> None:
        if self.term < 0:
            raise InvalidArgumentError(f"a ballot's term is {self.term}.")

    def __lt__(self, other: Ballot) -> bool:
        return (self.term, self.candidate) < (other.term, other.candidate)


NO_BALLOT = Ballot(0, "")


class Agreement(Record, kw_only=True):
    """The decision of a ballot: the next list of members, and what they do.

    Attributes:
        number: of the agreement; one more than that of the agreement that it follows.
        members: by rank. Only its voters (rules.py) decide on the next agreement.
        round: the latest round of workers so far; -1 before the first.
        runs: whether this agreement is that round; otherwise no workers run under it.
        restarts: charged for failures so far.
        host: the key of the agent that began the job.
        finish: how the job ended, if it did.
        is_urgent, may_replace: as in Start.
    """

    number: int
    members: tuple[Member, ...]
    round: int = -1
    runs: bool = False
    restarts: int = 0
    because: str = ""
    host: str = ""
    finish: Finish | None = None
    is_urgent: bool = True
    may_replace: bool = False

    def __post_init__(self) -> None:
        ranks = [member.node_rank for member in self.members]
        if self.runs and (not ranks or ranks != list(range(len(ranks))) or self.round < 0):
            raise InvalidArgumentError(f"round {self.round} has the node ranks {ranks!r:.60}.")

    @property
    def text(self) -> str:
        """What it says, in few words."""
        if self.finish is not None:
            return self.finish.outcome.value
        count = len(self.members)
        return f"round {self.round} of {count}" if self.runs else f"{count} stay"


# From members to the coordinator.


class Heartbeat(Record, kw_only=True):
    """A member's heartbeat.

    Attributes:
        ballot: the one that it follows.
        sent_at: its clock; returned in the Ack.
        stamp: of the latest Ack received; None: none under this ballot.
        number: of the latest agreement that it knows to be decided; -2: none.
        report: the complete state of this node.
    """

    key: str
    ballot: Ballot
    sent_at: float
    stamp: float | None
    number: int
    report: NodeReport


# From the coordinator to members.


class Ack(Record, kw_only=True):
    """The coordinator has received a heartbeat.

    Attributes:
        sent_at: of the heartbeat.
        stamp: the coordinator's clock; returned in the next Heartbeat.
        lease_s: for how long after it sent that heartbeat the member may run workers.
        number: of the latest agreement.
        waiting: how many nodes wait for the next round.
        done: members whose workers have succeeded and which may end before the others.
        is_stopping: whether the latest round is being ended, for nodes that wait to join.
    """

    ballot: Ballot
    sent_at: float
    stamp: float
    lease_s: float
    number: int
    waiting: int
    done: tuple[str, ...] = ()
    is_stopping: bool = False


class Go(Record, kw_only=True):
    """The round is agreed: start workers.

    Attributes:
        sent_at, lease_s: as in an Ack, of the member's latest heartbeat: a late order must not be
            obeyed.
        voters: which agents to call if the coordinator is lost.
    """

    ballot: Ballot
    sent_at: float
    lease_s: float
    number: int
    start: Start
    voters: tuple[Member, ...]


class Halt(Record, kw_only=True):
    """End the workers of a round."""

    ballot: Ballot
    stop: Stop


class Over(Record, kw_only=True):
    """The job is over, or continues without the receiver."""

    finish: Finish


class Unknown(Record, kw_only=True):
    """The receiver sends heartbeats, but is neither a member nor waiting: it should join."""

    ballot: Ballot


# Between a candidate, or the coordinator, and voters.


class Prepare(Record, kw_only=True):
    """Will you take part in no lower ballot?

    Attributes:
        decided: the latest agreement that the candidate knows of.
        is_trial: would you, if asked? Nothing is promised, so a candidate without a chance, because
            the others have a coordinator or there are too few, disturbs no one.
    """

    ballot: Ballot
    stamp: float
    decided: Agreement
    is_trial: bool


class Promise(Record, kw_only=True):
    """Yes, and this is the latest agreement that I accepted, if it may be newer than yours.

    Attributes:
        voter: the key that has the vote: the agent's, or its endpoint's before there is a job.
        member: the agent.
        was_lost: whether the last coordinator, or an earlier time of this one, ended so recently
            that workers within its leases may still run.
    """

    ballot: Ballot
    voter: str
    member: Member
    stamp: float
    accepted: Agreement | None
    accepted_in: Ballot
    was_lost: bool
    is_trial: bool


class Propose(Record, kw_only=True):
    """Accept this agreement, which follows `decided`."""

    ballot: Ballot
    stamp: float
    agreement: Agreement
    decided: Agreement


class Accepted(Record, kw_only=True):
    """I have. `store`: of the round's workers, if I have rank 0 there and it is open."""

    ballot: Ballot
    voter: str
    stamp: float
    number: int
    store: Endpoint | None = None


class Refused(Record, kw_only=True):
    """No: I have promised more, follow a live coordinator, or know more than you."""

    ballot: Ballot
    promised: Ballot
    job: str = ""
    leader: Member | None = None
    decided: Agreement | None = None


class Led(Record, kw_only=True):
    """This agent coordinates the job that `host` began.

    Attributes:
        number: of the latest agreement; this ballot decided it, or it was known before.
        round: the latest round of workers; -1: none yet.
        stamp: the coordinator's clock, if it is the sender; returned in the next Heartbeat.
    """

    ballot: Ballot
    leader: Member
    host: str
    number: int
    round: int
    stamp: float | None = None


Message = (
    Join
    | Heartbeat
    | Ack
    | Go
    | Halt
    | Over
    | Unknown
    | Prepare
    | Promise
    | Propose
    | Accepted
    | Refused
    | Led
    | Refuse
    | Notice
)


# What a driver performs.


class SendMessage(Record, kw_only=True):
    """Send to the agent with this key, over an existing connection or a new one to `at`.

    If another agent answers there, the intended one is gone: call `closed`. Without a connection
    and an address, the message is lost.
    """

    to: str
    at: Endpoint | None
    message: Message


class Call(Record, kw_only=True):
    """Send to whichever agent answers there."""

    at: Endpoint
    message: Message


class OpenStore(Record, kw_only=True):
    """This node has rank 0 in the coming round: open an empty worker store, call `store_opened`."""

    round: int
    members: tuple[Member, ...]


Action = SendMessage | Call | OpenStore | Start | Stop | Finish | Notice


class Setup(Record, kw_only=True):
    """What an agent is given at its start; the same on all, except for `me` and `slot`.

    Attributes:
        me: this agent; `key` is random and new in each process, `address` and `port` are where its
            driver listens.
        attempt: grows when a scheduler restarts the job; agents of another attempt are not peers.
        endpoints: where the job is found. A quorum of them begins it.
        slot: which of them this agent is; None: none.
        quorum: "members": any quorum continues; "host": only with the agent that began the job.
        drift: by how much two clocks may differ in speed.
    """

    me: Member
    run_id: str
    limits: Limits
    endpoints: tuple[Endpoint, ...]
    attempt: int = 0
    slot: int | None = None
    max_restarts: int = 0
    timeouts: Timeouts = Timeouts()
    quorum: str = "members"
    drift: float = 0.01

    @property
    def to_call(self) -> list[Endpoint]:
        """The endpoints at which others may be: not our own, unless it is a shared directory."""
        return [
            at for slot, at in enumerate(self.endpoints) if slot != self.slot or at.is_directory
        ]

    @property
    def fence_s(self) -> float:
        """An agent that has not been heard for this long counts as silent, and runs no workers."""
        return self.timeouts.silence_s

    @property
    def dead_s(self) -> float:
        """This long after an agent was last heard, its workers are certainly dead."""
        return (self.fence_s + self.timeouts.kill_s) * (1 + self.drift)


class Outbox:
    """The actions between two events.

    Attributes:
        own: this agent's messages to itself.
    """

    def __init__(self, key: str) -> None:
        self.own: deque[Message] = deque()
        self._key = key
        self._actions: list[Action] = []
        self._reasons: list[str] = []

    def add(self, actions: Iterable[Action], reason: str = "") -> None:
        """To be done next, in this order."""
        for action in actions:
            if isinstance(action, SendMessage) and action.to == self._key:
                self.own.append(action.message)
            else:
                self._actions.append(action)
        if reason:
            self._reasons.append(reason)

    def send(self, to: str, at: Endpoint | None, message: Message) -> None:
        """Send that to one agent, as in `SendMessage`."""
        self.add([SendMessage(to=to, at=at, message=message)])

    def take(self) -> Decision[Action]:
        """All actions; unread messages to itself are dropped."""
        self.own.clear()
        actions, self._actions = tuple(self._actions), []
        reason, self._reasons = "; ".join(self._reasons), []
        return Decision(actions, reason)
