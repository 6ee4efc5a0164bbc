"""A watch: our server pushes each change of the keys; the client does not poll.

A watch first reports every existing key, so that no change is missed before it begins. `fileno` can
be registered with any selector.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rallypoint.base.errors import StoreConnectionError, StoreFencedError
from rallypoint.store.connection import Connection
from rallypoint.store.packing import pack_key
from rallypoint.store.wire import EventKind, Status


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """A key was set, or deleted: then `value` is None."""

    key: str
    value: bytes | None


class Watch:
    """The events of all keys with a prefix. Use from one thread at a time."""

    def __init__(self, connection: Connection, prefix: str) -> None:
        self.prefix = prefix
        self._connection = connection
        self._pending = b""
        connection.send(b"\x43" + pack_key(prefix))

    def fileno(self) -> int:
        """Return the descriptor, readable when there is news; then call `events(0)`."""
        return self._connection.fileno()

    def events(self, timeout_s: float | None = None) -> list[KeyEvent]:
        """Return what has happened, waiting for the first event up to `timeout_s` or for ever.

        Returns an empty list when nothing happened in time.

        Raises:
            StoreConnectionError: the server is gone; open a new watch, which starts afresh.
            StoreFencedError: the round that is watched has ended.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self._parse()
            if found:
                return found
            left_s = None if deadline is None else deadline - time.monotonic()
            try:
                more = self._connection.receive_available(left_s)
            except OSError as error:
                raise StoreConnectionError(
                    f"the watch of {self.prefix!r} at the store {self._connection.endpoint} ended: "
                    f"{error.strerror or error}; check that the server is still running",
                    endpoint=self._connection.endpoint,
                    operation="watch",
                    key=self.prefix,
                ) from error
            if not more:
                return []
            self._pending += more

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._connection.close()

    def _parse(self) -> list[KeyEvent]:
        events: list[KeyEvent] = []
        data, start = self._pending, 0
        try:
            while start < len(data):
                if data[start] == Status.REPLY:
                    # The end of the initial keys; not needed, but it takes 2 bytes.
                    if len(data) < start + 2:
                        break
                    start += 2
                    continue
                parsed = _parse_event(data, start)
                if parsed is None:
                    break
                kind, raw_key, value, start = parsed
                if kind == EventKind.FENCED:
                    self._fenced(value.decode(errors="replace"))
                key = raw_key[1:].decode(errors="surrogateescape")
                events.append(KeyEvent(key, value if kind == EventKind.SET else None))
        finally:
            self._pending = data[start:]
        return events

    def _fenced(self, text: str) -> None:
        raise StoreFencedError(
            f"the watch of {self.prefix!r} at the store {self._connection.endpoint} ended: {text}; "
            "join the new round",
            endpoint=self._connection.endpoint,
            operation="watch",
            key=self.prefix,
        )


def _parse_event(data: bytes, start: int) -> tuple[int, bytes, bytes, int] | None:
    """Return kind, key, value and where the next message starts, or None if bytes are missing."""
    parts: list[bytes] = []
    end = start + 2
    for _ in range(2):
        if len(data) < end + 8:
            return None
        length = int.from_bytes(data[end : end + 8], "little")
        end += 8
        if len(data) < end + length:
            return None
        parts.append(data[end : end + length])
        end += length
    return data[start + 1], parts[0], parts[1], end
