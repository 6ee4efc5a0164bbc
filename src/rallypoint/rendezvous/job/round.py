"""A round, as frozen data: its nodes, their store, and the resulting ranks.

A `Seat` is all that a rendezvous gives to an agent. A round's number only grows; workers know it as
TORCHELASTIC_RESTART_COUNT. Pure.
"""

from __future__ import annotations

from rallypoint.base.address import endpoint_of
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.base.record import Record

_MOST_TEXT = 16 << 10  # of a member: all of them are sent in one message


class Endpoint(Record, kw_only=True):
    """Where a server listens; as text, HOST:PORT, with an IPv6 address in brackets.

    Or a directory that machines share, where servers write their addresses: `host` is its path, and
    the port is 0.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16 or "\0" in self.host:
            raise InvalidArgumentError(f"nothing can listen at {self.host!r:.60}:{self.port}.")

    @classmethod
    def parse(cls, text: str, default_port: int | None, *, name: str) -> Endpoint:
        """Read what `str` gives; the port may be left out if there is a default."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or port.endswith("]"):  # no port
            host, port = text.strip(), "" if default_port is None else str(default_port)
        is_bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if is_bracketed else host
        is_host = host and set(host).isdisjoint("[]" if is_bracketed else "[]:")
        is_port = port.isascii() and port.isdigit() and len(port) < 10 and int(port) < 65536
        if not (is_host and is_port):
            raise InvalidArgumentError(
                f"{name} is {text!r}; it must be HOST:PORT, with a port below 65536, and an IPv6"
                " address in brackets."
            )
        return cls(host=host, port=int(port))

    @classmethod
    def parse_all(cls, text: str, default_port: int, *, name: str) -> tuple[Endpoint, ...]:
        """Read several, with commas between them; empty: none."""
        items = [item.strip() for item in text.split(",")]
        return tuple(cls.parse(item, default_port, name=name) for item in items if item)

    @property
    def is_directory(self) -> bool:
        """Whether it is such a directory."""
        return not self.port and self.host.startswith("/")

    def __str__(self) -> str:
        return f"file://{self.host}" if self.is_directory else endpoint_of(self.host, self.port)


class Member(Record, kw_only=True):
    """One node's agent, and the number and role of its workers.

    Attributes:
        key: unique to this agent; even the same node's next one has another.
        node_rank: in the round; -1 before there is one.
        wish: the rank that it asks for, if any.
        taking_part: how many of its workers take part in the round; -1: all.
        address, port: how others reach it; empty: this machine; 0: it does not listen.
        addresses: further addresses from which its workers may connect.
    """

    key: str = ""
    node_rank: int = -1
    host: str
    local_world_size: int
    role: str = "default"
    wish: int | None = None
    address: str = ""
    port: int = 0
    addresses: tuple[str, ...] = ()
    taking_part: int = -1

    def __post_init__(self) -> None:
        size = self.local_world_size
        if self.node_rank < -1 or size < 0 or not -1 <= self.taking_part <= size:
            raise InvalidArgumentError(
                f"node {self.node_rank} ({self.host:.60}) has {size} workers, and"
                f" {self.taking_part} take part."
            )
        texts = (self.key, self.host, self.role, self.address, *self.addresses)
        if sum(map(len, texts)) > _MOST_TEXT:
            raise InvalidArgumentError(
                f"the names and addresses of host {self.host:.60} have more than {_MOST_TEXT}"
                " characters; choose a shorter --role, or host name."
            )

    @property
    def size(self) -> int:
        """How many workers it has in the round."""
        return self.local_world_size if self.taking_part < 0 else self.taking_part

    @property
    def endpoint(self) -> Endpoint:
        """Where its agent listens."""
        return Endpoint(host=self.address, port=self.port)


class Placement(Record, kw_only=True):
    """One worker's place in a round."""

    rank: int
    local_rank: int
    role_rank: int


class Seat(Record, kw_only=True):
    """What one node's agent needs of a round: of the same size for any number of nodes.

    Attributes:
        nodes: the number of nodes.
        local_world_size: how many workers of this node take part.
        first_rank, first_role_rank: of this node's workers; the others' follow.
    """

    number: int
    store: Endpoint
    node_rank: int
    nodes: int
    local_world_size: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int

    def __post_init__(self) -> None:
        size = self.local_world_size
        if not (
            0 <= self.node_rank < self.nodes
            and size >= 0
            and 0 <= self.first_rank <= self.world_size - size
            and 0 <= self.first_role_rank <= self.role_world_size - size
            and self.role_world_size <= self.world_size
            and self.number >= 0
        ):
            raise InvalidArgumentError(f"no node can have this seat: {self}.")

    @property
    def ranks(self) -> range:
        """The ranks of this node's workers."""
        return range(self.first_rank, self.first_rank + self.local_world_size)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The places of this node's workers: ranks count through the nodes in order."""
        return tuple(
            Placement(rank=self.first_rank + i, local_rank=i, role_rank=self.first_role_rank + i)
            for i in range(self.local_world_size)
        )


def seats_of(members: tuple[Member, ...], *, number: int, store: Endpoint) -> dict[str, Seat]:
    """Each member's seat in a round, by its key.

    Args:
        members: by node rank, which is 0, 1, ... without a gap.
        store: the worker store, empty at the start of the round.
    """
    ranks = [member.node_rank for member in members]
    if not ranks or ranks != list(range(len(ranks))):
        raise InvalidArgumentError(
            f"a round's node ranks must be 0, 1, ...; they are {ranks}: check --node-rank."
        )
    if len({member.key for member in members}) < len(members):
        raise InvalidArgumentError("two nodes of a round have the same key.")
    role_sizes: dict[str, int] = {}
    for member in members:
        role_sizes[member.role] = role_sizes.get(member.role, 0) + member.size
    world_size = sum(role_sizes.values())
    first, firsts_of_roles = 0, dict.fromkeys(role_sizes, 0)
    seats = {}
    for member in members:
        seats[member.key] = Seat(
            number=number,
            store=store,
            node_rank=member.node_rank,
            nodes=len(members),
            local_world_size=member.size,
            first_rank=first,
            world_size=world_size,
            first_role_rank=firsts_of_roles[member.role],
            role_world_size=role_sizes[member.role],
        )
        first += member.size
        firsts_of_roles[member.role] += member.size
    return seats
