"""A group of PyTorch 2.14 that gets other members: `reconfigure`.

rallypoint_group.py has the group, which keeps its place in programs; this forms its rounds.
"""

from __future__ import annotations

import json
import os
import secrets
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rallypoint.base.address import endpoint_of
from rallypoint.base.errors import AlreadyInitializedError, InvalidArgumentError
from rallypoint.process_group.formation.host_network import network_of
from rallypoint.process_group.formation.joining import reform_world
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.store.client import TCPStore
from rallypoint.store.init_method import JoinedStore
from rallypoint.store.server import StoreServer


class Reconfiguration:
    """A group's handle, and the rounds that it has had.

    Programs exchange handles by themselves. A handle says where its group's own store is, and which
    token that asks for. The members of a round connect through the store of the first handle, so no
    store has to outlive its process: the next round begins with another handle.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._server: StoreServer | None = None
        self._process = 0
        self._handle = ""
        self._used: set[int] = set()

    def handle(self) -> str:
        """Text by which the other members find this one; starts its store."""
        if self._server is None or self._process != os.getpid():
            network = network_of(self._group.world.store, self._group.backend)
            token = secrets.token_hex(16)
            host = network.address if network.is_own else "0.0.0.0"
            self._server = StoreServer(host, token=token.encode())
            self._process = os.getpid()
            endpoint = {"host": network.address, "port": self._server.port, "token": token}
            self._handle = json.dumps({"id": uuid.uuid4().hex, **endpoint})
        return self._handle

    def form(self, number: int, handles: Sequence[str] | set[str], timeout: timedelta) -> None:
        """Form the round of this number with the members of these handles, in their order."""
        if number in self._used:
            raise AlreadyInitializedError(
                f"reconfigure: uuid {number} was already used for this group; pass a fresh one"
            )
        ordered = sorted(handles) if isinstance(handles, set) else list(handles)
        if ordered.count(self._handle) != 1:
            raise InvalidArgumentError(
                "reconfigure: the handles must hold this group's own once; get_reconfigure_handle "
                "returns it"
            )
        endpoint = _read(ordered[0])
        self._used.add(number)
        group = self._group
        group.world.group = group  # also that of a subgroup, which keeps no ranks of the old round
        group.world.is_across_jobs = True
        store = TCPStore(
            endpoint["host"],
            endpoint["port"],
            timeout=timeout,
            wait_for_workers=False,
            token=endpoint["token"].encode(),
        )
        try:
            reform_world(
                group,
                JoinedStore(store=store, rank=ordered.index(self._handle), world_size=len(ordered)),
                f"reconfigure/{number}",
                timeout=timeout,
                on_destroy=store.close,
            )
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        """The group has ended."""
        if self._server is not None and self._process == os.getpid():
            self._server.close()
        self._server = None


def _read(handle: str) -> dict[str, Any]:
    try:
        endpoint = json.loads(handle)
        endpoint_of(endpoint["host"], endpoint["port"])
        endpoint["token"].encode()
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InvalidArgumentError(
            f"reconfigure: {handle[:80]!r} is not a handle of a rallypoint group"
        ) from None
    return dict(endpoint)
