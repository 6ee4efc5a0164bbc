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
_LOOK_AGAIN_S = 1.0  # for a name


class NetworkPlace:
    """This node's place in the network, once the endpoints' names are known.

    Attributes:
        choice: the address for others, and why; None: not known yet.
        slot, listener: which endpoint this node listens at, if it does.
    """

    def __init__(self, rendezvous: Rendezvous, *, is_host: bool | None) -> None:
        self.choice: NetworkChoice | None = None
        self.slot: int | None = None
        self.listener: socket.socket | None = None
        self._endpoints = rendezvous.endpoints
        self._local_addr = rendezvous.local_addr
        self._is_host = is_host

    def find(self, wait_s: float, to_find_out: str) -> None:
        """Find it, and wait for names that cannot be resolved yet, as of a starting machine.

        `to_find_out`: see Job.
        """
        began = notice_at = time.monotonic()
        while True:
            try:
                return in_thread(self._find)
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
            time.sleep(min(_LOOK_AGAIN_S, wait_s))

    def _find(self) -> None:
        self.choice = self._choose()
        if self._is_host is not False:
            self._take_endpoint()

    @property
    def address(self) -> str:
        """This node's address for others."""
        return "" if self.choice is None else self.choice.address

    @property
    def is_chosen(self) -> bool:
        """The user chose the address or its interface: listen only there."""
        return self.choice is not None and self.choice.is_wished and self.choice.is_own

    def _choose(self) -> NetworkChoice:
        """Towards the first endpoint that has a name and a route to it."""
        first_error: HostError | None = None
        # Where all are on one machine, variables are about other networks.
        environ = {} if is_loopback(self._endpoints[0].host) else os.environ
        for endpoint in self._endpoints:
            try:
                return self._towards(endpoint.host, environ)
            except HostError as error:
                # An unknown name may be known later: that counts more than what will not change.
                if first_error is None or isinstance(error, UnknownHostError):
                    first_error = error
        assert first_error is not None
        raise first_error

    def _towards(self, host: str, environ: Mapping[str, str]) -> NetworkChoice:
        wish, is_remote = self._local_addr, not is_loopback(host)
        try:
            return choose_network([host], environ, local_addr=wish, has_remote_peers=is_remote)
        except UnknownHostError:
            if wish is None and is_own_name(host):  # others know it, sooner or later
                return choose_network([], environ, has_remote_peers=True)
            raise

    def _take_endpoint(self) -> None:
        """Listen at the first endpoint that is on this machine, if it is free."""
        for slot, endpoint in enumerate(self._endpoints):
            if self._is_host or self._is_here(endpoint):
                is_chosen = self.is_chosen and endpoint.host in (self._local_addr, self.address)
                place = listening_place(
                    self.address if is_chosen else endpoint.host, is_chosen=is_chosen
                )
                self.listener = _listen(place, endpoint.port, is_ours=bool(self._is_host))
                if self.listener is not None:
                    self.slot = slot
                    return

    def _is_here(self, endpoint: Endpoint) -> bool:
        try:
            return is_here(endpoint.host, self._local_addr)
        except UnknownHostError:
            if len(self._endpoints) == 1:
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
