"""The interface at which a group's ranks on other hosts reach this one."""

from __future__ import annotations

import os

from rallypoint.base.address import is_loopback
from rallypoint.base.worker_env import LOCAL_ADDR
from rallypoint.cluster.interface import choose_network
from rallypoint.cluster.interface_choice import NetworkChoice
from rallypoint.cluster.network import IFNAME_VARIABLES
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.store import Store

_LOOPBACK = "127.0.0.1"


def network_of(store: Store, backend: str) -> NetworkChoice:
    """The interface at which ranks on other hosts reach this one, chosen as a launcher does."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host: str | None = getattr(store, "host", None)
    local_addr = os.environ.get(LOCAL_ADDR)
    is_wished = local_addr or any(os.environ.get(variable) for variable in IFNAME_VARIABLES)
    if backend == "tcp" and host is None and not is_wished:
        host = _LOOPBACK
    return choose_network(
        [] if host is None else [host],
        os.environ,
        local_addr=local_addr,
        by=LOCAL_ADDR,
        # Ranks of "tcp" may all be here, and so may those whose store is on loopback.
        has_remote_peers=backend != "tcp" and host is not None and not is_loopback(host),
    )
