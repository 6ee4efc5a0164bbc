"""One group's end of another backend, with errors that people can act on.

The library's first error breaks the end, as with the engine's communicators: the library's further
behaviour is not known. The store shows which rank died: each member has a key there that is deleted
with its connection.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from rallypoint.base.errors import (
    CollectiveTimeoutError,
    HostError,
    MismatchError,
    PeerError,
    PeerLostError,
    RallypointError,
    RevokedError,
    StoreError,
)
from rallypoint.engine.communicator import UNUSABLE
from rallypoint.process_group import DEFAULT_GROUP
from rallypoint.process_group.delegated.delegate import (
    Block,
    Delegate,
    LibraryCall,
    LibraryFailure,
    Pending,
)
from rallypoint.store.init_method import Presence
from rallypoint.store.store import Store

_WELL, _BROKEN = "well", "broken"  # how a member has left
_DEATH_S = 1.0  # how long the store may take to show one

T = TypeVar("T")


class _Lost(NamedTuple):
    """A member that is gone: its rank in the group, and how it said that it left."""

    rank: int
    reported: str


class _LostError(TimeoutError):
    """A member that this rank waits for is gone."""

    def __init__(self, lost: _Lost) -> None:
        super().__init__()
        self.lost = lost


class LibraryGroup:
    """A member's end of a group at one library.

    Args:
        prefix: the beginning of the members' keys at the store.
        ranks: their global ranks.
        title: the group's name for people.
    """

    def __init__(
        self,
        delegate: Delegate,
        store: Store,
        prefix: str,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        title: str,
    ) -> None:
        self.name = delegate.name
        self.device = delegate.device
        self.timeout_s = timeout_s
        self.adopt: Callable[..., Block] = delegate.adopt
        self.empty: Callable[..., Block] = delegate.empty
        self.why_not: Callable[..., str] = delegate.why_not
        self._delegate = delegate
        self._store, self._prefix = store, prefix
        self._rank, self._ranks = rank, ranks
        self._where = "" if title == DEFAULT_GROUP else f"in the {title}: "
        self._lock = threading.Lock()
        self._error: PeerError | None = None
        self._has_left = False

    def begin(self, request: LibraryCall, operation: str) -> Pending:
        """Start a collective."""
        return self._guarded(lambda: self._delegate.begin(request), operation)

    def transfer(
        self, *, sends: bool, peer: int, tag: int, block: Block, operation: str
    ) -> Pending:
        """Start a send or a receive; raises as `begin`."""
        return self._guarded(
            lambda: self._delegate.transfer(sends=sends, peer=peer, tag=tag, block=block), operation
        )

    @contextmanager
    def batch(self, operation: str) -> Iterator[None]:
        """Transfers within it begin together, at its end; raises as `begin`."""
        self._guarded(self._delegate.open_batch, operation)
        try:
            yield
        finally:
            self._guarded(self._delegate.close_batch, operation)

    def wait(self, pending: Pending, left_s: float, timeout_s: float, operation: str) -> None:
        """Wait until it is over, for as long as its timeout allows."""
        self._guarded(lambda: self._wait(pending, left_s), operation, timeout_s)

    def is_done(self, pending: Pending, operation: str) -> bool:
        """Whether it is over; never waits. Raises as `wait` if it failed."""
        return self._guarded(pending.is_done, operation)

    def _wait(self, pending: Pending, left_s: float) -> None:
        """Check between waits whether a needed member has left."""
        until = time.monotonic() + left_s
        while True:
            left_s = until - time.monotonic()
            try:
                return pending.wait(min(max(left_s, 0.001), self._delegate.patience_s))
            except TimeoutError:
                if left_s <= self._delegate.patience_s:
                    raise
                found = self._find_lost(LibraryFailure.LATE)
                if found is not None:
                    raise _LostError(found) from None

    def set_timeout(self, timeout_s: float) -> None:
        """How long operations that start from now on wait for a peer."""
        self.timeout_s = timeout_s

    def leave(self) -> None:
        """Leave the group; peers that wait for this rank find that it has left."""
        self._end(self._delegate.close if self._error is None else self._delegate.abort)

    def abort(self) -> None:
        """Leave, and end operations in progress."""
        self._end(self._delegate.abort)

    withdraw = abort  # the group may be formed again

    def revoke(self) -> None:
        """End operations in progress and refuse others; peers find that this rank is gone."""
        with self._lock:
            if self._error is None:
                self._error = RevokedError(f"{self._where}this rank revoked the group{UNUSABLE}")
        self._say_left()
        with suppress(Exception):
            self._delegate.abort()

    def _end(self, close: Callable[[], None]) -> None:
        if not self._has_left:
            self._has_left = True
            self._say_left()
            with suppress(Exception):  # closing a broken library may fail
                close()

    def _say_left(self) -> None:
        with suppress(StoreError, HostError, OSError):
            how = _WELL if self._error is None else _BROKEN
            self._store.set(f"{self._prefix}/{self._rank}/left", how)
            own = [f"{self._prefix}/{self._rank}", f"{self._prefix}/told/{self._rank}"]
            self._store.delete_keys(own)

    def _guarded(
        self, function: Callable[[], T], operation: str, timeout_s: float | None = None
    ) -> T:
        if self._error is not None:
            raise self._error
        try:
            return function()
        except RallypointError:  # a refusal
            raise
        except (RuntimeError, ValueError, OSError) as error:
            limit = self.timeout_s if timeout_s is None else timeout_s
            raise self._broken(error, operation, limit) from error

    def _broken(self, error: Exception, operation: str, timeout_s: float) -> PeerError:
        with self._lock:
            if self._error is None:
                self._error = self._put(error, operation, timeout_s)
            return self._error

    def _put(self, error: Exception, operation: str, timeout_s: float) -> PeerError:
        """The library's error in our words, with the rank at fault if the store shows it."""
        is_late = isinstance(error, TimeoutError)
        trouble = LibraryFailure.LATE if is_late else self._delegate.trouble(error)
        said = _first_sentence(error)
        says = f"{self.name} says: {said}" if said else f"{self.name} did not complete it"
        lost = error.lost if isinstance(error, _LostError) else None
        if lost is None and trouble in (LibraryFailure.LATE, LibraryFailure.LOST):
            lost = self._find_lost(trouble)
        kind: type[PeerError] = PeerError
        text = f"{operation}: {says}"
        rank = None
        if lost is not None:
            kind, rank = PeerLostError, self._ranks[lost.rank]
            text = f"rank {rank} ended during {operation} ({says})"
            if lost.reported:
                text = f"rank {rank} had left the group when {operation} needed it ({says})"
        elif trouble is LibraryFailure.LATE:
            kind = CollectiveTimeoutError
            text = (
                f"{operation} was not completed by {self.name} within {timeout_s:g} s; check "
                "what the other ranks are doing, or pass a longer timeout to init_process_group"
            )
        elif trouble is LibraryFailure.LOST:
            kind = PeerLostError
            text = f"{operation}: a peer ended, or its connection ended ({says})"
        elif trouble is LibraryFailure.LENGTHS:
            kind = MismatchError
            text = f"{operation}: a message is longer than expected ({says}); pass equal lengths"
        return kind(f"{self._where}{text}{UNUSABLE}", rank=rank, operation=operation)

    def _find_lost(self, trouble: LibraryFailure) -> _Lost | None:
        """The member that is gone, if the store shows one."""
        presence = Presence(self._store, self._prefix, self._ranks)
        try:
            if trouble is LibraryFailure.LATE:
                presence.look(range(len(self._ranks)), have_come=True)
                # Not counting ranks that gave up because of another.
                gone = sorted(rank for rank in presence.gone if self._how_left(rank) != _BROKEN)
                return _Lost(gone[0], self._how_left(gone[0])) if gone else None
            found = presence.find_lost(_DEATH_S)
            if found is None or found.rank is None:
                return None
            rank = self._ranks.index(found.rank)
            return _Lost(rank, self._how_left(rank))
        except (StoreError, HostError, OSError):
            return None  # the store is gone, and so is its host

    def _how_left(self, rank: int) -> str:
        """How a member has left; empty: it did not say."""
        key = f"{self._prefix}/{rank}/left"
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _first_sentence(error: Exception) -> str:
    """Without the preceding line in the library's source and the advice that follows."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0].rstrip(".!")
