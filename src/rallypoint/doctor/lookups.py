"""What names resolve to on this node. A name service may hang, so each lookup has a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rallypoint.base.errors import RallypointError
from rallypoint.cluster.network import addresses_of, can_bind, is_own_name
from rallypoint.doctor.cluster_facts import Lookup

NAME_S = 2.0  # limit for the name service


def look_up(host: str, wait_s: float = NAME_S) -> Lookup:
    """Resolve a name, within a time limit."""
    return look_up_all([host], wait_s)[0]


def look_up_all(hosts: Sequence[str], wait_s: float) -> tuple[Lookup, ...]:
    """Resolve names, all at once, within one time limit."""
    found: dict[str, Lookup] = {}

    def ask(host: str) -> None:
        try:
            found[host] = Lookup(host=host, addresses=tuple(addresses_of(host)))
        except RallypointError as error:
            found[host] = Lookup(host=host, error=_why(error))

    threads = [threading.Thread(target=ask, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    until = time.monotonic() + wait_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    silent = f"the name service does not answer within {wait_s:g} s"
    return tuple(found.get(host) or Lookup(host=host, error=silent) for host in hosts)


def is_this_node(lookup: Lookup) -> bool:
    """Whether a name is this machine's: by its names, or because it can bind the address."""
    return is_own_name(lookup.host) or any(can_bind(address) for address in lookup.addresses)


def _why(error: RallypointError) -> str:
    """The system's error text, which is in brackets."""
    text = str(error)
    return text[text.find("(") + 1 : text.find(")")] if "(" in text else text
