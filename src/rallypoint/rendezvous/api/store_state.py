"""What nodes that meet in a store keep there: keys under rallypoint.rendezvous/<run id>/.

    state        where the rendezvous stands: written only by the one who leads, and only if it
                 still holds what that one wrote last
    node/<n>     one node's place: written only by that node, in the same way; once it is given up,
                 it is GIVEN_UP for good
    rings        how often somebody rang; ring/<n> appears with the n-th time, to wait for
    alive/<key>  vanishes with the connection of the node of that key, if the store can do that
    closed       why there is no further round, if so
    <n>/store/   the store of round n

Frozen data and names; no decisions here.
"""

from __future__ import annotations

from rallypoint.base.record import Record
from rallypoint.rendezvous.job.round import Member

GIVEN_UP = b"-"


class RendezvousKeys(Record):
    """The names of a rendezvous's keys, from what all of them begin with."""

    root: str

    @classmethod
    def of(cls, run_id: str) -> RendezvousKeys:
        """For a job's name."""
        return cls(f"rallypoint.rendezvous/{run_id}/")

    @property
    def state(self) -> str:
        """A `RendezvousState`."""
        return self.root + "state"

    @property
    def closed(self) -> str:
        """Why there is no further round."""
        return self.root + "closed"

    @property
    def rings(self) -> str:
        """A number."""
        return self.root + "rings"

    def ring(self, number: int) -> str:
        """Appears when somebody rings."""
        return f"{self.root}ring/{number}"

    def node(self, slot: int) -> str:
        """A `Place`, or GIVEN_UP."""
        return f"{self.root}node/{slot}"

    def alive(self, key: str) -> str:
        """Vanishes with a node's connection."""
        return f"{self.root}alive/{key}"

    def store(self, round_number: int) -> str:
        """The prefix of a round's keys."""
        return f"{self.root}{round_number}/store"


class Place(Record, kw_only=True):
    """What a node says.

    Attributes:
        beat: grows; if it stops, so did the node.
        ended: the newest round that the node has left; -1: none.
        is_tied: whether its key `alive` vanishes with its connection.
    """

    member: Member
    beat: int = 0
    ended: int = -1
    is_tied: bool = False


class RendezvousState(Record, kw_only=True):
    """Where the rendezvous stands.

    Attributes:
        term: how many have led so far.
        lead, slot: who leads, and its place; empty, and -1: nobody yet.
        round, members: the newest round; -1 before the first.
        runs: whether that round is not over on all nodes.
        stopped: why it is to end, if so.
        waiting: how many nodes wait for the next one.
        first: no place before this one is taken.
        text: who is here and who is missing, while there are too few.
    """

    term: int = 0
    lead: str = ""
    slot: int = -1
    round: int = -1
    members: tuple[Member, ...] = ()
    runs: bool = False
    stopped: str = ""
    waiting: int = 0
    first: int = 0
    text: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether the newest round runs, and is to."""
        return self.runs and not self.stopped

    def rank_of(self, key: str) -> int | None:
        """A node's rank in the newest round; None: it takes no part."""
        return next((each.node_rank for each in self.members if each.key == key), None)
