"""Adds to a network error what this host finds out about its cause (doctor/quick.py)."""

from __future__ import annotations

import os
import threading
from typing import NoReturn, TypeVar

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import RallypointError, StoreConnectionError, StoreRefusedError

AnyError = TypeVar("AnyError", bound=RallypointError)


class NetworkDiagnosis:
    """Examines once, for at most two seconds, why another side is not connected."""

    def __init__(self) -> None:
        self._has_begun = False
        self._found = ""

    def begin(self, host: str, port: int, *, role: str, is_caller: bool) -> None:
        """The same as `run`, in a thread, while the others are still running."""
        where = {"role": role, "is_caller": is_caller}
        threading.Thread(target=self.run, args=(host, port), kwargs=where, daemon=True).start()

    def run(self, host: str, port: int, *, role: str, is_caller: bool = True) -> None:
        """Examine now, unless that was done before or the network is not involved.

        Args:
            host, port: the other side.
            role: what listens there.
            is_caller: this rank had to connect; otherwise the other one.
        """
        if self._has_begun or is_loopback(host):
            return
        self._has_begun = True
        from rallypoint.doctor.quick import finding_about  # slow, and seldom wanted

        place = [(host, port)]
        self._found = finding_about(place, os.environ, count=2, role=role, is_caller=is_caller)

    def added_to(self, error: AnyError) -> AnyError:
        """The error, with the finding added."""
        if self._found:
            from rallypoint.doctor.quick import told_with

            error.args = (told_with(str(error), self._found),)
        return error


def raise_with_finding(error: StoreConnectionError) -> NoReturn:
    """Raise an error again with a finding: the store of a forming group cannot be reached."""
    host, _, port = (error.endpoint or "").rpartition(":")
    diagnosis = NetworkDiagnosis()
    if port.isdecimal() and not isinstance(error, StoreRefusedError):
        diagnosis.run(host.strip("[]"), int(port), role="where the store is")
    raise diagnosis.added_to(error)
