"""A round, as frozen data: who takes part, where their store is, and which ranks follow from that.

This is all that a rendezvous hands to an agent. A round's number only grows; workers know it as
TORCHELASTIC_RESTART_COUNT. Pure.
"""

from __future__ import annotations

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record


class Endpoint(Record, kw_only=True):
    """Where a server listens."""

    host: str
    port: int


class Member(Record, kw_only=True):
    """One node's agent, and how many workers of which role it brings.

    Attributes:
        key: what no other agent has, not even the same node's next one.
        node_rank: in the round; -1 before there is one.
        wish: the rank that it asks for, if any.
        address: how others reach it; empty: this machine.
    """

    key: str = ""
    node_rank: int = -1
    host: str
    local_world_size: int
    role: str = "default"
    wish: int | None = None
    address: str = ""


class Placement(Record, kw_only=True):
    """Which place of a round one worker takes."""

    rank: int
    local_rank: int
    role_rank: int


class Round(Record, kw_only=True):
    """One agreement on who takes part.

    Attributes:
        members: by node rank, which is 0, 1, ... without a gap.
        store: the worker store, empty at the start of the round.
    """

    number: int
    members: tuple[Member, ...]
    store: Endpoint

    def __post_init__(self) -> None:
        ranks = [member.node_rank for member in self.members]
        if not ranks or ranks != list(range(len(ranks))):
            raise InvalidArgumentError(
                f"a round's node ranks must be 0, 1, ...; they are {ranks}: look at --node-rank."
            )

    @property
    def world_size(self) -> int:
        """All workers of all nodes."""
        return sum(member.local_world_size for member in self.members)

    def node_rank_of(self, key: str) -> int | None:
        """The rank of a member, if it is one."""
        return next((each.node_rank for each in self.members if each.key == key), None)

    def role_world_size(self, role: str) -> int:
        """All workers of one role."""
        return sum(each.local_world_size for each in self.members if each.role == role)

    def placements(self, node_rank: int) -> tuple[Placement, ...]:
        """The places of one node's workers: ranks count through the nodes in order."""
        mine, before = self.members[node_rank], self.members[:node_rank]
        first = sum(member.local_world_size for member in before)
        first_of_role = sum(each.local_world_size for each in before if each.role == mine.role)
        return tuple(
            Placement(rank=first + i, local_rank=i, role_rank=first_of_role + i)
            for i in range(mine.local_world_size)
        )
