"""Handles of operations of other backends, with the interface of process_group.work.Work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rallypoint.base.errors import CollectiveTimeoutError, PeerError
from rallypoint.engine.engine_work import report
from rallypoint.process_group.delegated.delegate import Pending
from rallypoint.process_group.delegated.end import LibraryGroup
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.work import Future
from rallypoint.store.store import seconds_of


class DelegatedWork:
    """One operation in progress.

    Args:
        outputs: the arrays that it fills in.
        finish: called after success, before waiters are notified.
        timeout_s: from now on.
    """

    def __init__(
        self,
        group: ProcessGroup,
        end: LibraryGroup,
        pending: Pending,
        operation: str,
        outputs: Sequence[Any],
        finish: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.operation = operation
        self._ranks = group.ranks
        self._end = end
        self._pending = pending
        self._outputs = outputs
        self._finish = finish
        self._until = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._is_over = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See Work."""
        if timeout is not None and not self._is_over and not self._is_done():
            self._wait_a_while(seconds_of(timeout))
        self._settle()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """See Work."""
        if not self._is_over and self._is_done():
            self._settle()
        if self._error is not None or self._end.device == "cpu":
            return self._is_over
        # It may have been waited for on the device, where it may still continue.
        return self._is_over and self._pending.is_done()

    def is_success(self) -> bool:
        """See Work."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """See Work."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Any]:
        """See Work."""
        return list(self._outputs)

    @property
    def peer(self) -> int:
        """The sender's rank in the group, of a receive that is over."""
        return self._pending.source()

    def source_rank(self) -> int:
        """See Work."""
        if self.operation != "irecv" or not self.is_success():
            return -1
        return self._ranks[self.peer]

    def get_future(self) -> Future:
        """See Work."""
        return Future.of(self)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """See Work: runs in a thread that waits for the operation."""

        def serve() -> None:
            self._settle()
            try:
                callback(self)
            except BaseException as error:
                report(error)

        if self.is_completed():
            callback(self)
        else:
            threading.Thread(target=serve, name="rallypoint-callbacks", daemon=True).start()

    def _wait_a_while(self, wait_s: float) -> None:
        """Wait for as long as the caller allows, which the library does not know."""
        until, pause_s = time.monotonic() + wait_s, 1e-5
        while not self._is_done():
            if time.monotonic() > until:
                raise CollectiveTimeoutError(
                    f"{self.operation} was not completed within {wait_s:g} s; it is still "
                    "running, so wait again, or abort the group",
                    operation=self.operation,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)

    def _is_done(self) -> bool:
        """Whether the library is done with it, with or without an error."""
        try:
            return self._error is not None or self._end.is_done(self._pending, self.operation)
        except PeerError as error:
            self._error, self._is_over = error, True
            return True

    def _settle(self) -> None:
        """Wait until it is over, then finish, once; concurrent callers wait."""
        with self._lock:
            if self._is_over:
                return
            try:
                left_s = max(self._until - time.monotonic(), 0.001)
                self._end.wait(self._pending, left_s, self._timeout_s, self.operation)
                self._finish()
            except PeerError as error:
                self._error = error
            self._is_over = True
