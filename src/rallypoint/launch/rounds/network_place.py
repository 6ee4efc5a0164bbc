"""A node's place in the network: its address for others, and whether it listens at an endpoint.

It waits for names, because a machine that is just starting may not be resolvable yet.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import HostError
from rallypoint.base.record import Record
from rallypoint.cluster.interface import choose_network
from rallypoint.cluster.interface_choice import NetworkChoice
from rallypoint.cluster.names import in_thread
from rallypoint.cluster.network import UnknownHostError, is_here, is_own_name
from rallypoint.launch.job import Rendezvous
from rallypoint.launch.output.terminal import say
from rallypoint.launch.rounds.store_host import ANY, listen
from rallypoint.rendezvous.job.coordinator import next_notice
from rallypoint.rendezvous.job.round import Endpoint

_BINDING_S = 0.5
_RETRY_S = 1.0  # for a name


class NetworkPlace(Record, kw_only=True):
    """This node's place in the network.

    Attributes:
        choice: the address for others, and why.
        stores_at: where the stores of its workers listen.
        listener: where its agent listens.
        slot: which endpoint that is; None: none.
    """

    choice: NetworkChoice
    stores_at: str
    listener: socket.socket
    slot: int | None = None

    @property
    def at(self) -> Endpoint:
        """Where others find its agent."""
        return Endpoint(host=self.choice.address, port=self.listener.getsockname()[1])


def find_place(
    rendezvous: Rendezvous, *, is_host: bool | None, wait_s: float, to_find_out: str
) -> NetworkPlace:
    """Wait for names that cannot be resolved yet, as of a starting machine.

    Args:
        is_host: whether this node listens at an endpoint; None: if one is on this machine.
        wait_s: for how long to wait.
        to_find_out: see Job.
    """
    found: list[NetworkPlace] = []
    began = notice_at = time.monotonic()
    while True:
        try:
            in_thread(lambda: found.append(_find(rendezvous, is_host=is_host)))
            return found[0]
        except UnknownHostError as error:
            now = time.monotonic()
            if now >= began + wait_s:
                raise HostError(f"after {now - began:.0f} s: {error}") from None
            if now >= notice_at:
                told = f"waiting for a name to resolve, for {now - began:.0f} s so far: {error}"
                if notice_at == began:
                    waits = f"waiting for up to {wait_s:.0f} s, as it may be known only later"
                    told = f"{str(error).rstrip('.')}; {waits}; {to_find_out}"
                notice_at = next_notice(began, now)
                say(told)
        time.sleep(min(_RETRY_S, wait_s))


def any_port(choice: NetworkChoice) -> NetworkPlace:
    """A place that is no endpoint."""
    place = listening_place(choice.address, is_chosen=choice.is_wished and choice.is_own)
    return NetworkPlace(choice=choice, stores_at=place, listener=listen(place, 0))


def _find(rendezvous: Rendezvous, *, is_host: bool | None) -> NetworkPlace:
    """Listen at the first endpoint that is on this machine, if it is free."""
    choice, local_addr = _choose(rendezvous), rendezvous.local_addr
    address, is_wished = choice.address, choice.is_wished and choice.is_own
    for slot, endpoint in enumerate(rendezvous.endpoints if is_host is not False else ()):
        if is_host or _is_here(endpoint, rendezvous):
            is_chosen = is_wished and endpoint.host in (local_addr, address)
            place = listening_place(address if is_chosen else endpoint.host, is_chosen=is_chosen)
            listener = _listen(place, endpoint.port, is_ours=bool(is_host))
            if listener is not None:
                stores_at = listening_place(address, is_chosen=is_wished)
                return NetworkPlace(
                    choice=choice, stores_at=stores_at, listener=listener, slot=slot
                )
    return any_port(choice)


def _choose(rendezvous: Rendezvous) -> NetworkChoice:
    """Towards the first endpoint that has a name and a route to it."""
    first_error: HostError | None = None
    # Where all are on one machine, variables are about other networks.
    environ = {} if is_loopback(rendezvous.endpoints[0].host) else os.environ
    for endpoint in rendezvous.endpoints:
        try:
            return _towards(endpoint.host, environ, rendezvous.local_addr)
        except HostError as error:
            # An unknown name may be known later: that counts more than what will not change.
            if first_error is None or isinstance(error, UnknownHostError):
                first_error = error
    assert first_error is not None
    raise first_error


def _towards(host: str, environ: Mapping[str, str], local_addr: str | None) -> NetworkChoice:
    is_remote = not is_loopback(host)
    try:
        return choose_network([host], environ, local_addr=local_addr, has_remote_peers=is_remote)
    except UnknownHostError:
        if local_addr is None and is_own_name(host):  # others know it, sooner or later
            return choose_network([], environ, has_remote_peers=True)
        raise


def _is_here(endpoint: Endpoint, rendezvous: Rendezvous) -> bool:
    try:
        return is_here(endpoint.host, rendezvous.local_addr)
    except UnknownHostError:
        if len(rendezvous.endpoints) == 1:
            raise
        return False  # a machine that is down may have no name


def _listen(place: str, port: int, *, is_ours: bool) -> socket.socket | None:
    """The endpoint's listener; None if another agent of this machine already has it."""
    deadline = time.monotonic() + _BINDING_S
    while True:
        try:
            return listen(place, port)
        except HostError:
            if not is_ours and _answers(place, port):
                return None
            # One that began just now has the port for a moment before it listens there.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def listening_place(address: str, *, is_chosen: bool = False) -> str:
    """Where to listen for those who reach us at this address."""
    if not is_loopback(address):
        return address if is_chosen else ANY
    return "127.0.0.1" if address == "localhost" else address


def _answers(place: str, port: int) -> bool:
    """Whether something listens at this port of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET) as probe:
        return probe.connect_ex((place, port)) == 0
