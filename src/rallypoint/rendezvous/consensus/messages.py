"""What the agents of a job say to each other, and what they ask of their drivers.

    member -> coordinator    Join, Beat            Ack, Go, Halt, Over, Unknown    <- coordinator
    candidate -> voters      Prepare, Propose      Promise, Accepted, Refused      <- voters
    anyone -> anyone         Led: who coordinates

Every message can be lost, repeated or late: what counts is said again with each beat. Times in
messages are the sender's clock's, and only ever come back to it. Frozen data; no decisions here.
"""

from __future__ import annotations

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.rendezvous.job.membership import Limits
from rallypoint.rendezvous.job.reports import Finish, Join, Notice, Refuse, Report, Start, Stop
from rallypoint.rendezvous.job.round import Endpoint, Member
from rallypoint.rendezvous.timeouts import Timeouts


class Ballot(Record):
    """An attempt to lead: the higher term counts, then the candidate's key."""

    term: int
    candidate: str

    def __lt__(self, other: Ballot) -> bool:
        return (self.term, self.candidate) < (other.term, other.candidate)


NO_BALLOT = Ballot(0, "")


class Agreement(Record, kw_only=True):
    """What a ballot decides: the next list of members, and what they do.

    Attributes:
        number: of the agreement; each is one more than the one that it follows.
        members: by rank. Only its voters (voter.py) decide on the next agreement.
        round: the newest round of workers up to now; -1 before the first.
        runs: whether this agreement is that round; else nothing runs under it.
        restarts: charged for failures so far.
        host: the key of the agent that began the job.
        finish: how the job ended, if it did.
    """

    number: int
    members: tuple[Member, ...]
    round: int = -1
    runs: bool = False
    restarts: int = 0
    because: str = ""
    host: str = ""
    finish: Finish | None = None

    def __post_init__(self) -> None:
        if self.runs and not self.members:
            raise InvalidArgumentError("a round needs members.")


# From members to the coordinator.


class Beat(Record, kw_only=True):
    """A member is here. It repeats what the coordinator has not confirmed.

    Attributes:
        ballot: the one that it follows.
        sent_at: its clock; comes back in the Ack.
        stamp: of the newest Ack that it has; None: it has none under this ballot.
        number: of the newest agreement that it knows to be decided; -2: none.
        round: what runs here; -1: nothing.
        reports: from number `first` on.
    """

    key: str
    ballot: Ballot
    sent_at: float
    stamp: float | None
    number: int
    round: int
    first: int
    reports: tuple[Report, ...]


# From the coordinator to members.


class Ack(Record, kw_only=True):
    """The coordinator has heard a beat.

    Attributes:
        sent_at: of the beat.
        stamp: the coordinator's clock; comes back in the next Beat.
        lease_s: for how long after it sent that beat the member may run workers.
        seen: how many reports have come.
        number: of the newest agreement.
        waiting: how many wait for the next round.
        done: members whose workers have succeeded and who may end before the others.
        is_stopping: whether the newest round is being ended, for those who wait to come in.
    """

    ballot: Ballot
    sent_at: float
    stamp: float
    lease_s: float
    seen: int
    number: int
    waiting: int
    done: tuple[str, ...] = ()
    is_stopping: bool = False


class Go(Record, kw_only=True):
    """The round is agreed: start workers.

    Attributes:
        sent_at, lease_s: as in an Ack, of the member's newest beat: an order that comes too late
            must not be obeyed.
        voters: whom to call if the coordinator is lost.
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
    """The job is over, or goes on without the one that is told."""

    finish: Finish


class Unknown(Record, kw_only=True):
    """You beat, but are no member here and not waiting to be one: join."""

    ballot: Ballot


# Between a candidate, or the coordinator, and voters.


class Prepare(Record, kw_only=True):
    """Will you take part in no lower ballot?

    Attributes:
        decided: the newest agreement that the candidate knows of.
        is_trial: would you, if asked? Nothing is promised, so that who has no chance, because the
            others have a coordinator or because there are too few, disturbs nobody.
    """

    ballot: Ballot
    stamp: float
    decided: Agreement
    is_trial: bool


class Promise(Record, kw_only=True):
    """Yes, and this is the newest agreement that I accepted, if it may be newer than yours.

    Attributes:
        voter: the key that has the vote: the agent's, or its endpoint's before there is a job.
        member: the agent.
        was_lost: whether the last coordinator, or an earlier time of this one, ended so lately
            that what it allowed others to run may still run.
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
    """No: I have promised more, follow a coordinator that lives, or know more than you."""

    ballot: Ballot
    promised: Ballot
    job: str = ""
    leader: Member | None = None
    decided: Agreement | None = None


class Led(Record, kw_only=True):
    """This agent coordinates the job that `host` began.

    Attributes:
        number: of the newest agreement; this ballot decided it, or it was known before.
        round: the newest round of workers; -1: none yet.
        stamp: the coordinator's clock, if it says this itself; comes back in the next Beat.
    """

    ballot: Ballot
    leader: Member
    host: str
    number: int
    round: int
    stamp: float | None = None


Message = (
    Join
    | Beat
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


class Send(Record, kw_only=True):
    """Send to the agent with this key: over a connection with it, or else call it there.

    If another agent answers there, the one that was meant is gone: tell `closed`. Without a
    connection and a place to call, the message is lost.
    """

    to: str
    at: Endpoint | None
    message: Message


class Call(Record, kw_only=True):
    """Send to whoever answers there."""

    at: Endpoint
    message: Message


class OpenStore(Record, kw_only=True):
    """This node has rank 0 in the coming round: open an empty worker store, tell `store_opened`."""

    round: int
    members: tuple[Member, ...]


Action = Send | Call | OpenStore | Start | Stop | Finish | Notice


class Setup(Record, kw_only=True):
    """What an agent is told when it starts; the same on all, but for `me` and `slot`.

    Attributes:
        me: this agent; `key` is random and new in each process, `address` and `port` are where its
            driver listens.
        attempt: grows when a scheduler starts the job anew; agents of another one are no peers.
        endpoints: where the job is found. A quorum of them begins it.
        slot: which of them this agent is; None: none.
        quorum: "members": any quorum goes on; "host": only with the one that began the job.
        kill_s: within which an agent that must end its workers at once has ended them.
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
    kill_s: float = 1.0
    drift: float = 0.01

    @property
    def to_call(self) -> list[Endpoint]:
        """The endpoints at which others may be: not our own, unless it is a shared directory."""
        return [
            at for slot, at in enumerate(self.endpoints) if slot != self.slot or at.is_directory
        ]

    @property
    def fence_s(self) -> float:
        """Who has not been heard for so long counts as silent, and runs no workers."""
        return self.timeouts.silence_s

    @property
    def dead_s(self) -> float:
        """So long after an agent was last heard its workers are surely dead."""
        return (self.fence_s + self.kill_s) * (1 + self.drift)
