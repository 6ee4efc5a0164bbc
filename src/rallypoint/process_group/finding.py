"""Adds to an error of the network what this host sees of its reason (cluster/health/quick.py)."""

from __future__ import annotations

import os
from typing import NoReturn

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import StoreConnectionError, StoreRefusedError


def with_finding(error: str, host: str, port: int, *, role: str, is_caller: bool = True) -> str:
    """The message, with the first cause that shows within two seconds, if one does.

    Args:
        host, port: the other side of the connection.
        role: what is there.
        is_caller: this rank was to connect; else the other one was.
    """
    if is_loopback(host):  # no network has a part in it
        return error
    from rallypoint.cluster.health.quick import finding_about, told_with  # slow, and seldom wanted

    finding = finding_about([(host, port)], os.environ, count=2, role=role, is_caller=is_caller)
    return told_with(error, finding)


def raise_with_finding(error: StoreConnectionError) -> NoReturn:
    """Raise it again: the store of a group that forms cannot be reached.

    Raises:
        StoreConnectionError: always.
    """
    host, _, port = (error.endpoint or "").rpartition(":")
    if port.isdecimal() and not isinstance(error, StoreRefusedError):
        text = with_finding(str(error), host.strip("[]"), int(port), role="where the store is")
        error.args = (text,)
    raise error
