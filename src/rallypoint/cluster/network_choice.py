"""What the user asked of this machine's network, and what was chosen, with the reason.

Frozen data and their texts: interface_choice.py makes a choice, the launcher and `rallypoint where`
show it. Pure.
"""

from __future__ import annotations

from rallypoint.base.address import is_loopback
from rallypoint.base.record import Record
from rallypoint.cluster.interface_facts import Interface

_MOST_TOLD = 4  # a machine may have a bridge for each of its many containers


class AddressWish(Record, kw_only=True):
    """The user named an address.

    Attributes:
        by: the flag or variable.
        text: its value.
        addresses: what the value stands for, numeric; at least one.
        own: those of them that are this machine's.
    """

    by: str
    text: str
    addresses: tuple[str, ...]
    own: tuple[str, ...]


class NameWish(Record, kw_only=True):
    """The user named interfaces.

    Attributes:
        by: the variable.
        text: its value; see `matching`.
    """

    by: str
    text: str


class PassedOver(Record, kw_only=True):
    """An interface that was not chosen, and why."""

    interface: str
    why: str


class NetworkChoice(Record, kw_only=True):
    """What was chosen.

    Attributes:
        address: what others are given.
        interface: which has it, or by which packets leave; None: it is not known.
        reason: why, as the end of a sentence.
        passed_over: the other interfaces that lead anywhere.
        is_wished: the user named it.
        is_own: the address is this machine's: it can listen there.
        instead: with a wish, what the route to the others would have chosen, if that is another
            interface, as text; empty: nothing better is known.
        is_doubtful: others will hardly reach it.
        had_rivals: there was something to choose from.
    """

    address: str
    interface: Interface | None
    reason: str
    passed_over: tuple[PassedOver, ...] = ()
    is_wished: bool = False
    is_own: bool = True
    instead: str = ""
    is_doubtful: bool = False
    had_rivals: bool = False

    @property
    def name(self) -> str:
        """The interface's; empty if it is not known."""
        return "" if self.interface is None else self.interface.name

    @property
    def is_loopback(self) -> bool:
        """Only this machine itself is reached."""
        return is_loopback(self.address)

    def __str__(self) -> str:
        """``"eth0, 10.0.0.1 (10 Gbit/s, MTU 1500): the route to node1:29400 leads through it"``."""
        of = "" if self.interface is None else f" ({self.interface.rate})"
        head = f"{self.name}, {self.address}" if self.name else self.address
        return f"{head}{of}: {self.why}"

    @property
    def told(self) -> str:
        """The same, and what was passed over."""
        over = [f"{each.interface} ({each.why})" for each in self.passed_over]
        if len(over) > _MOST_TOLD:
            over[_MOST_TOLD:] = [f"{len(over) - _MOST_TOLD} more"]
        return f"{self}; passed over: {', '.join(over)}" if over else str(self)

    @property
    def event(self) -> dict[str, object]:
        """For programs: docs/events.md."""
        of = self.interface
        return {
            "interface": self.name or None,
            "address": self.address,
            "kind": None if of is None else of.kind.value,
            "speed_mbps": None if of is None else of.speed_mbps,
            "mtu": None if of is None else of.mtu,
            "reason": self.why,
            "passed_over": [
                {"interface": each.interface, "why": each.why} for each in self.passed_over
            ],
        }

    @property
    def why(self) -> str:
        """The reason, and what speaks against it."""
        return f"{self.reason}, though {self.instead}" if self.instead else self.reason
