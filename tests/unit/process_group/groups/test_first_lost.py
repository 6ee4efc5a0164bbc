"""Whether the store is asked who died first."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.base.errors import PeerLostError
from rallypoint.process_group.groups import call_errors
from rallypoint.process_group.groups.call_errors import found_when_formed
from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer


@pytest.mark.parametrize(("is_world", "asks"), [(True, False), (False, True)])
def test_a_store_is_not_asked_once_all_have_met(
    monkeypatch: pytest.MonkeyPatch, is_world: bool, asks: bool
) -> None:
    """It may be on a machine that does not answer; other groups than the default one may form."""
    monkeypatch.setattr(call_errors, "_ANSWER", timedelta(seconds=60))
    lost = PeerLostError("rank 1 died", rank=1)
    with StoreServer() as server, TCPStore("127.0.0.1", server.port) as store:
        store.set_timeout(timedelta(seconds=90))
        world = SimpleNamespace(store=store, has_met=True)
        group: Any = SimpleNamespace(world=world, is_world=is_world, own_rank=1)
        group.prefix, group.ranks = "p", (0, 1)
        before = server.counters()[2]
        assert found_when_formed(group, lost) is lost
        assert (server.counters()[2] > before) is asks
        assert store.timeout == timedelta(seconds=90)
