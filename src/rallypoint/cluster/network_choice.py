"""The user's settings for this machine's network, and what was chosen, with the reason.

Frozen data, and their text: interface_choice.py makes the choice, the launcher and `rallypoint
where` show it. Pure.
"""

from __future__ import annotations

from rallypoint.base.address import is_loopback
from rallypoint.base.record import Record
from rallypoint.cluster.interface_facts import Interface

_MOST_TOLD = 4  # a machine may have a bridge for each of its many containers


class AddressChoice(Record, kw_only=True):
    """The user named an address.

    Attributes:
        by: the flag or variable.
        text: its value.
        addresses: the numeric addresses that the value resolves to; at least one.
        own: those of them that belong to this machine.
    """

    by: str
    text: str
    addresses: tuple[str, ...]
    own: tuple[str, ...]


class NameChoice(Record, kw_only=True):
    """The user named interfaces.

    Attributes:
        by: the variable.
        text: its value; see `matching`.
    """

    by: str
    text: str


class PassedOver(Record, kw_only=True):
    """An interface that was not chosen, and the reason."""

    interface: str
    why: str


class NetworkChoice(Record, kw_only=True):
    """The choice of an interface and address.

    Attributes:
        address: the address that others are given.
        interface: the interface that has it, or by which packets leave; None if unknown.
        reason: the reason, as the end of a sentence.
        passed_over: the other interfaces that lead to other machines.
        is_wished: whether the user named it.
        is_own: whether the address belongs to this machine, which can then listen there.
        instead: if the user named one, the interface that the route to the others would have
            chosen, if that is another, as text; empty if nothing better is known.
        is_doubtful: whether others are unlikely to reach it.
        had_rivals: whether there were alternatives.
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
        """The interface's name; empty if unknown."""
        return "" if self.interface is None else self.interface.name

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.address)

    def __str__(self) -> str:
        """``"eth0, 10.0.0.1 (10 Gbit/s, MTU 1500): the route to node1 uses it"``."""
        of = "" if self.interface is None else f" ({self.interface.rate})"
        head = f"{self.name}, {self.address}" if self.name else self.address
        return f"{head}{of}: {self.why}"

    @property
    def told(self) -> str:
        """The same text, with the interfaces that were passed over."""
        over = [f"{each.interface} ({each.why})" for each in self.passed_over]
        if len(over) > _MOST_TOLD:
            over[_MOST_TOLD:] = [f"{len(over) - _MOST_TOLD} more"]
        return f"{self}; passed over: {', '.join(over)}" if over else str(self)

    @property
    def event(self) -> dict[str, object]:
        """The choice as an event for programs: docs/events.md."""
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
        """The reason, and any doubts."""
        return f"{self.reason}, though {self.instead}" if self.instead else self.reason
