"""Which interface and address a node or rank gives to the others: one decision, with its reason.

    what the user says         --local-addr, then RALLYPOINT_SOCKET_IFNAME or another such variable
    else where the others are  the interface whose route leads to them, with the kernel's source
    else what is likely        the default route's before others, tunnels last, and never loopback
                               or a bridge of containers while there is anything else

Pure: interfaces and routes are arguments (interface_facts.py), which network.py provides. The
launcher and `rallypoint where` show the choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.record import Record
from rallypoint.cluster.interface_facts import Address, Interface, InterfaceKind, InterfaceTarget

# How unlikely others are to reach a machine through an interface; 0 for all other kinds.
_UNLIKELY = {
    InterfaceKind.OTHER: 1,
    InterfaceKind.TUNNEL: 2,
    InterfaceKind.CONTAINER_BRIDGE: 3,
    InterfaceKind.LOOPBACK: 4,
}
_MOST_TOLD = 4  # a machine may have a bridge for each of its many containers


class AddressChoice(Record, kw_only=True):
    """An address that the user named, by a flag or variable.

    Attributes:
        by, text: the flag or variable, and its value.
        addresses: what the value resolves to, at least one; `own`: those of this machine.
    """

    by: str
    text: str
    addresses: tuple[str, ...]
    own: tuple[str, ...]


class NameChoice(Record, kw_only=True):
    """Interfaces that the user named: the variable `by` has the value `text`; see `matching`."""

    by: str
    text: str


class PassedOver(Record, kw_only=True):
    """An interface that was not chosen, and the reason."""

    interface: str
    why: str


class NetworkChoice(Record, kw_only=True):
    """The choice of an interface and address.

    Attributes:
        interface: the interface that has it, or by which packets leave; None if unknown.
        reason: the reason, as the end of a sentence.
        passed_over: the other interfaces that lead to other machines.
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


def choose(
    interfaces: Sequence[Interface],
    *,
    wish: AddressChoice | NameChoice | None = None,
    towards: Sequence[InterfaceTarget] = (),
    has_remote_peers: bool = False,
    default: str = "",
) -> NetworkChoice:
    """Choose an interface and address.

    Args:
        interfaces: this machine's; empty if unknown.
        towards: those to reach, in order of preference; empty if unknown.
        default: the interface of the default route.
        has_remote_peers: whether some are on other machines, even if `towards` does not show it.
    """
    if has_remote_peers:  # some machines resolve their own name to loopback; others do not
        towards = [each for each in towards if not is_loopback(each.address)]
    is_remote = has_remote_peers or any(each.is_remote for each in towards)
    if isinstance(wish, AddressChoice) and not is_loopback(wish.text) and is_remote:
        wish = _without_loopback(wish)
    if isinstance(wish, AddressChoice):
        found = _as_addressed(interfaces, wish, towards, is_remote=is_remote)
    elif wish is not None:
        found = _as_named(interfaces, wish, towards, default, is_remote=is_remote)
    elif towards:
        found = _by_route(interfaces, towards)
    else:
        found = _likely(interfaces, default, is_remote=is_remote)
    others = [each for each in ranked(interfaces) if each.is_useful and each.name != found.name]
    return found.__replace__(
        passed_over=tuple(
            [PassedOver(interface=each.name, why=_why_not(each, towards)) for each in others]
        ),
        had_rivals=found.is_wished or any(each.is_candidate for each in others),
    )


def matching(wish: str, names: Sequence[str]) -> list[str]:
    """The names that a list of prefixes (or "=" names, or "^" exclusions) selects.

    It is read as NCCL reads it. The result follows the order of the list; among the names with the
    same prefix, an exact match comes first, e.g. "eth1" before "eth10".
    """
    if wish.startswith("^"):
        words = _words(wish)
        return [name for name in names if not any(_fits(wish, name, word) for word in words)]
    groups = _groups(wish, names)
    return list(dict.fromkeys(name for group in groups for name in group))


def ranked(interfaces: Sequence[Interface], default: str = "") -> list[Interface]:
    """The interfaces that are up and have an address, the most reachable first."""

    def cost(each: Interface) -> tuple[bool, int, bool]:
        is_link_only = all(address.is_link_only for address in each.addresses)
        return is_link_only, _UNLIKELY.get(each.kind, 0), each.name != default

    return sorted([each for each in interfaces if each.is_up and each.addresses], key=cost)


def best_address(interface: Interface, towards: Sequence[InterfaceTarget] = ()) -> Address:
    """The best address of an interface that has any: first by the others' network, then by their
    address family.

    After that, permanent addresses that are valid beyond the link are preferred, then IPv4.
    """

    def cost(address: Address) -> tuple[bool, ...]:
        return (
            not any(address.is_network_of(each.packed) for each in towards),
            bool(towards) and all(len(address.packed) != len(each.packed) for each in towards),
            address.is_link_only,
            address.is_passing,
            len(address.packed) != 4,
        )

    return min(interface.addresses, key=cost)


# The ways to choose.


def _without_loopback(wish: AddressChoice) -> AddressChoice | None:
    """The wish without loopback addresses, which others do not have; None if none is left."""
    addresses = tuple([each for each in wish.addresses if not is_loopback(each)])
    if not addresses:
        return None
    own = tuple([each for each in wish.own if each in addresses])
    return wish.__replace__(addresses=addresses, own=own)


def _as_addressed(
    interfaces: Sequence[Interface],
    wish: AddressChoice,
    towards: Sequence[InterfaceTarget],
    *,
    is_remote: bool,
) -> NetworkChoice:
    address = (wish.own or wish.addresses)[0]
    if is_loopback(address) and is_remote:
        names = ", ".join(each.name for each in towards if each.is_remote) or "others"
        raise InvalidArgumentError(
            f"{wish.by} {wish.text} is this machine's loopback ({address}), which other nodes at"
            f" {names} cannot reach; give the address of a network interface."
        )
    found = _owner(interfaces, address)
    reason = f"{wish.by} {wish.text} says so"
    if not wish.own:
        reason += ", though no interface of this machine has that address"
    return NetworkChoice(
        address=address,
        interface=found,
        reason=reason,
        is_wished=True,
        is_own=bool(wish.own),
        instead=_instead(found, interfaces, towards) if wish.own else "",
    )


def _as_named(
    interfaces: Sequence[Interface],
    wish: NameChoice,
    towards: Sequence[InterfaceTarget],
    default: str,
    *,
    is_remote: bool,
) -> NetworkChoice:
    usable = {each.name: each for each in interfaces if each.is_up and each.addresses}
    names = [each.name for each in interfaces]
    is_exclusion = wish.text.startswith("^")
    groups = [matching(wish.text, names)] if is_exclusion else _groups(wish.text, names)
    found = next((group for group in groups if any(name in usable for name in group)), None)
    if found is None:
        raise HostError(_no_match(interfaces, wish, towards))
    candidates = [usable[name] for name in found if name in usable]
    if is_exclusion:  # exclusions give no order
        candidates = ranked(candidates, default)
    leading = [each for each in candidates if _leads(each, towards)]
    chosen = (leading or candidates)[0]
    said = f"{wish.by}={wish.text}"
    if chosen.kind is InterfaceKind.LOOPBACK and is_remote:
        other = _routed(interfaces, towards)
        raise HostError(
            f"{said} chooses {chosen}, the loopback, at which other machines cannot reach this one;"
            f" choose {other or 'another interface'}."
        )
    instead = _instead(chosen, interfaces, towards)
    return NetworkChoice(
        address=best_address(chosen, towards).text,
        interface=chosen,
        reason=f"{said} says so",
        is_wished=True,
        instead=instead,
        is_doubtful=bool(instead) and chosen.kind is InterfaceKind.CONTAINER_BRIDGE,
    )


def _by_route(interfaces: Sequence[Interface], towards: Sequence[InterfaceTarget]) -> NetworkChoice:
    target = next((each for each in towards if each.route is not None), None)
    if target is None:
        first = towards[0]
        raise HostError(
            f"there is no route to {first.name} ({first.why_not}); this machine has "
            f"{_listed(interfaces)}; or give its address with --local-addr."
        )
    assert target.route is not None
    if target.route.is_own or is_loopback(target.address):
        return NetworkChoice(
            address=target.address,
            interface=_owner(interfaces, target.address),
            reason=f"{target.name} is on this machine",
        )
    source = target.route.source
    if is_loopback(source):
        raise HostError(
            f"this node's address towards {target.name} is its loopback {source}, which other "
            "nodes cannot reach; check /etc/hosts, or give an address with --local-addr."
        )
    named = next((each for each in interfaces if each.name == target.route.interface), None)
    return NetworkChoice(
        address=source,
        interface=named or _owner(interfaces, source),
        reason=f"the route to {target.name} uses it",
    )


def _likely(interfaces: Sequence[Interface], default: str, *, is_remote: bool) -> NetworkChoice:
    found = [each for each in ranked(interfaces, default) if each.is_candidate]
    if not found and is_remote:
        raise HostError(
            "no interface at which other machines could reach this one is up; it has "
            f"{_listed(interfaces)}; or give its address with --local-addr."
        )
    if not found:
        loopback = next((each for each in interfaces if each.kind is InterfaceKind.LOOPBACK), None)
        return NetworkChoice(
            address="127.0.0.1", interface=loopback, reason="no other interface can be used"
        )
    reason = "it is the only one that others can reach"
    if len(found) > 1:
        reason = "it is the likeliest, because the other nodes' addresses are unknown"
    if len(found) > 1 and found[0].name == default:
        reason = "the default route uses it, and the other nodes' addresses are unknown"
    return NetworkChoice(address=best_address(found[0]).text, interface=found[0], reason=reason)


# What the ways share.


def _words(wish: str) -> list[str]:
    return [word for word in wish.lstrip("^=").split(",") if word]


def _fits(wish: str, name: str, word: str) -> bool:
    return name == word if wish.lstrip("^").startswith("=") else name.startswith(word)


def _groups(wish: str, names: Sequence[str]) -> list[list[str]]:
    """The names that each word of a list matches, the word itself first."""
    return [
        sorted([name for name in names if _fits(wish, name, word)], key=lambda name: name != word)
        for word in _words(wish)
    ]


def _owner(interfaces: Sequence[Interface], address: str) -> Interface | None:
    owners = [each for each in interfaces if any(a.text == address for a in each.addresses)]
    if not owners and address.startswith("127."):  # loopback owns its whole network
        owners = [each for each in interfaces if each.kind is InterfaceKind.LOOPBACK]
    return owners[0] if owners else None


def _leads(interface: Interface, towards: Sequence[InterfaceTarget]) -> bool:
    """Whether the others are in this interface's network, or the route to them leads through it."""
    return any(
        (each.is_remote and each.route is not None and each.route.interface == interface.name)
        or any(address.is_network_of(each.packed) for address in interface.addresses)
        for each in towards
    )


def _instead(
    chosen: Interface | None, interfaces: Sequence[Interface], towards: Sequence[InterfaceTarget]
) -> str:
    """``"the route to node1 uses eth0 (10.0.0.1)"``; empty if the choice leads there."""
    known = [each for each in towards if not is_loopback(each.address)]
    if chosen is None or not known or _leads(chosen, known):
        return ""
    if other := _routed(interfaces, known):
        name = next(each.name for each in known if each.is_remote)
        return f"the route to {name} uses {other}"
    owner = _owner(interfaces, known[0].address)
    return f"{known[0].name} is at {owner}" if owner else ""


def _routed(interfaces: Sequence[Interface], towards: Sequence[InterfaceTarget]) -> str:
    """The interface that leads to the others, as text; empty if unknown."""
    for target in towards:
        if target.is_remote and target.route is not None and target.route.interface:
            names = [each for each in interfaces if each.name == target.route.interface]
            return str(names[0]) if names else target.route.interface
    return ""


def _why_not(interface: Interface, towards: Sequence[InterfaceTarget]) -> str:
    if any(each.is_remote for each in towards) and interface.is_candidate:
        return "leads there" if _leads(interface, towards) else "the route uses another one"
    return interface.kind.value


def _no_match(
    interfaces: Sequence[Interface], wish: NameChoice, towards: Sequence[InterfaceTarget]
) -> str:
    better = _routed(interfaces, towards)
    route = f", and the route to {towards[0].name} uses {better}" if better else ""
    usual = next((each.name for each in interfaces if each.is_candidate), "")
    name = better.partition(" ")[0] or usual
    return (
        f"{wish.by}={wish.text}: no interface of this machine that is up and has an address"
        f" matches: it has {_listed(interfaces)}{route}; "
        f"{f'set {wish.by}={name}, or unset it' if name else f'unset {wish.by}'}"
    )


def _listed(interfaces: Sequence[Interface]) -> str:
    return ", ".join(map(str, interfaces)) or "no interface that is known"
