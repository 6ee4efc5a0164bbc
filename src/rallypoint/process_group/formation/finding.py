"""Adds to an error of the network what this host sees of its reason (cluster/health/quick.py)."""

from __future__ import annotations

import os
import threading
from typing import NoReturn, TypeVar

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import RallypointError, StoreConnectionError, StoreRefusedError

AnyError = TypeVar("AnyError", bound=RallypointError)


class NetworkLook:
    """Looks once, for at most two seconds, why another side is not connected."""

    def __init__(self) -> None:
        self._has_begun = False
        self._found = ""

    def begin(self, host: str, port: int, *, role: str, is_caller: bool) -> None:
        """The same as `look`, in a thread: while others are still there."""
        where = {"role": role, "is_caller": is_caller}
        threading.Thread(target=self.look, args=(host, port), kwargs=where, daemon=True).start()

    def look(self, host: str, port: int, *, role: str, is_caller: bool = True) -> None:
        """Look now, unless it has looked, or no network has a part in it.

        Args:
            host, port: the other side.
            role: what is there.
            is_caller: this rank was to connect; else the other one was.
        """
        if self._has_begun or is_loopback(host):
            return
        self._has_begun = True
        from rallypoint.cluster.health.quick import finding_about  # slow, and seldom wanted

        place = [(host, port)]
        self._found = finding_about(place, os.environ, count=2, role=role, is_caller=is_caller)

    def added_to(self, error: AnyError) -> AnyError:
        """The error, which says what was found as well."""
        if self._found:
            from rallypoint.cluster.health.quick import told_with

            error.args = (told_with(str(error), self._found),)
        return error


def raise_with_finding(error: StoreConnectionError) -> NoReturn:
    """Raise it again: the store of a group that forms cannot be reached.

    Raises:
        StoreConnectionError: always.
    """
    host, _, port = (error.endpoint or "").rpartition(":")
    look = NetworkLook()
    if port.isdecimal() and not isinstance(error, StoreRefusedError):
        look.look(host.strip("[]"), int(port), role="where the store is")
    raise look.added_to(error)
