"""From which addresses a round's workers may reach their store (launch/rounds/store_host.py).

Its protocol knows no token, so it goes by addresses; see docs/decisions/035-who-may-speak.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.base.address import numeric_family
from rallypoint.rendezvous.job.round import Member

ANY = "::"  # every interface, IPv4 and IPv6


def addresses_of_members(members: Iterable[Member]) -> list[str]:
    """From where a round's workers may come, as numbers."""
    given = [address for each in members for address in (each.address, *each.addresses)]
    return [each for each in dict.fromkeys(given) if numeric_family(each) is not None]
