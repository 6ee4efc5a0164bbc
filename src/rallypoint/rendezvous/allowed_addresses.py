"""The addresses from which a round's workers may reach their store (launch/rounds/store_host.py).

The store's protocol has no token, so it checks addresses; see docs/decisions/035-who-may-speak.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.base.address import numeric_family
from rallypoint.rendezvous.job.round import Member

ANY = "::"  # every interface, IPv4 and IPv6


def addresses_of_members(members: Iterable[Member]) -> list[str]:
    """The addresses of a round's workers, in numeric form."""
    given = [address for each in members for address in (each.address, *each.addresses)]
    return [each for each in dict.fromkeys(given) if numeric_family(each) is not None]
