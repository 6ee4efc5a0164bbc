"""One flat set of keys and queues, with the connections that wait for them or watch them.

Unbound connections share one keyspace; each round of a fenced namespace has its own, which ends
with the round. Pure data: state.py decides which messages are sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rallypoint.store import wire
from rallypoint.store.local_store import number_in
from rallypoint.store.wire import Opcode


@dataclass(slots=True)
class Entry:
    """A value, and the connection whose end deletes it, if any."""

    value: bytes
    owner: int | None = None


@dataclass(slots=True)
class Keyspace:
    """Keys, queues and lines of waiting connections.

    A queue with items in it has no takers waiting, and an empty queue does not exist. `waiters` and
    `takers` hold connections in order of arrival, each at most once per key.
    """

    name: bytes = b""
    round: int = 0
    fenced_by: int | None = None
    entries: dict[bytes, Entry] = field(default_factory=dict)
    queues: dict[bytes, deque[bytes]] = field(default_factory=dict)
    waiters: dict[bytes, list[int]] = field(default_factory=dict)
    takers: dict[bytes, list[int]] = field(default_factory=dict)
    watchers: list[tuple[int, bytes]] = field(default_factory=list)
    members: set[int] = field(default_factory=set)

    def has(self, key: bytes) -> bool:
        """Return whether a waiter for `key` is already satisfied."""
        return key in self.entries or key in self.queues

    def value(self, key: bytes) -> bytes:
        """Return the value, empty if the key is missing."""
        entry = self.entries.get(key)
        return entry.value if entry else b""

    def values(self, keys: Iterable[bytes]) -> bytes:
        """Return the values of all `keys` as a reply holds them."""
        return b"".join(wire.blob(self.value(key)) for key in keys)

    def number(self, key: bytes) -> int | None:
        """Return the value as a counter, 0 if the key is missing, None if it is not a number."""
        entry = self.entries.get(key)
        if entry is None:
            return 0
        return number_in(entry.value)

    def length(self, queue: bytes) -> int:
        """Return how many values a queue holds."""
        return len(self.queues.get(queue, ()))

    def pop(self, queue: bytes) -> bytes:
        """Take the first value of a queue that has one."""
        values = self.queues[queue]
        value = values.popleft()
        if not values:
            del self.queues[queue]
        return value

    def line(self, opcode: Opcode) -> dict[bytes, list[int]]:
        """Return the queues of connections that wait by `opcode`."""
        return self.takers if opcode is Opcode.QUEUE_TAKE else self.waiters

    def fence(self, by: int) -> None:
        """End this round because round `by` has begun: nothing of it remains."""
        self.fenced_by = by
        for content in (self.entries, self.queues, self.waiters, self.takers, self.watchers):
            content.clear()

    def fenced_text(self) -> str:
        """Return the message for a client of this round, which is over."""
        name = self.name.decode(errors="replace")
        return f"round {self.round} of '{name}' ended when round {self.fenced_by} began"
