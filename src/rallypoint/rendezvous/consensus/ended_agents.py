"""Agents that are known to be dead or gone, by key; only the latest are kept.

Forgetting one is safe: it would only be waited for longer, and no later list of members contains
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

MOST = 1 << 16  # several times as many as a job has members


class EndedAgents(Collection[str]):
    """Their keys; no later process has the same key."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = dict.fromkeys(keys)

    def add(self, key: str) -> None:
        """That agent has ended."""
        self._keys[key] = None
        if len(self._keys) > MOST:
            del self._keys[next(iter(self._keys))]

    def discard(self, key: str) -> None:
        """It was heard again: only a connection had ended."""
        self._keys.pop(key, None)

    def __contains__(self, key: object) -> bool:
        """Whether that agent has ended."""
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        """Oldest first."""
        return iter(self._keys)

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._keys)
