"""torch's reconfigure, for PyTorch 2.14 and newer: a group gets other members and stays the same.

Each group has a handle, which programs exchange by themselves: where its own store is, and the
token that it asks for. The members of a round meet at the store of the first handle, so no store
must outlive its process: the next round begins with another handle.
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
from rallypoint.process_group.formation.own_interface import network_of
from rallypoint.process_group.formation.reforming import reform_world
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.store.client import TCPStore
from rallypoint.store.init_method import JoinedStore
from rallypoint.store.server import StoreServer


class Reconfiguring:
    """What a group needs to be reconfigured: its handle, and the rounds that it has seen."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._server: StoreServer | None = None
        self._process = 0
        self._handle = ""
        self._used: set[int] = set()

    def handle(self) -> str:
        """Text by which the other members find this one; its store is served from now on."""
        if self._server is None or self._process != os.getpid():
            network = network_of(self._group.world.store, self._group.backend)
            token = secrets.token_hex(16)
            host = network.address if network.is_own else "0.0.0.0"
            self._server = StoreServer(host, token=token.encode())
            self._process = os.getpid()
            place = {"host": network.address, "port": self._server.port, "token": token}
            self._handle = json.dumps({"id": uuid.uuid4().hex, **place})
        return self._handle

    def form(self, number: int, handles: Sequence[str] | set[str], timeout: timedelta) -> None:
        """Form the round of this number with the members of these handles, in their order.

        Raises:
            InvalidArgumentError: one is no handle, or this group's is not among them.
            AlreadyInitializedError: the number was used before.
            StoreConnectionError, StoreTimeoutError, CollectiveTimeoutError, PeerLostError,
                HostError: as init_process_group.
        """
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
        place = _read(ordered[0])
        self._used.add(number)
        group = self._group
        group.world.group = group  # also that of a subgroup, which keeps no ranks of the old round
        group.world.is_across_jobs = True
        store = TCPStore(
            place["host"],
            place["port"],
            timeout=timeout,
            wait_for_workers=False,
            token=place["token"].encode(),
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
        self._group.world.release_store()
        if self._server is not None and self._process == os.getpid():
            self._server.close()
        self._server = None


def _read(handle: str) -> dict[str, Any]:
    try:
        place = json.loads(handle)
        endpoint_of(place["host"], place["port"])
        place["token"].encode()
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InvalidArgumentError(
            f"reconfigure: {handle[:80]!r} is not a handle of a rallypoint group"
        ) from None
    return dict(place)
