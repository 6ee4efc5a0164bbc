"""What connections to other hosts need here: an interface, descriptors, congestion control; and
what this host finds out if one fails.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import (
    HostError,
    InvalidArgumentError,
    RallypointError,
    StoreConnectionError,
    StoreRefusedError,
)
from rallypoint.base.worker_env import LOCAL_ADDR
from rallypoint.cluster.interface_choice import NetworkChoice
from rallypoint.cluster.network import IFNAME_VARIABLES, choose_network
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


_SPARE = 200  # for whatever else the program opens


def make_room(needed: int, wished: int, *, ranks: int) -> None:
    """Raise the limit of descriptors for a number of connections, as far as the system allows.

    Args:
        needed: connections without which the group of `ranks` cannot form.
        wished: connections that may be made later, including the needed ones.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    try:
        is_open = len(list(Path("/proc/self/fd").iterdir()))
    except (FileNotFoundError, PermissionError):  # there is no /proc
        is_open = 0
    wanted = is_open + wished + _SPARE
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if is_open + needed > max(most, soft):
        raise HostError(
            f"this rank needs {is_open + needed} file descriptors, {needed} of them for "
            f"connections to {ranks} ranks, but its limit is {hard}; raise the hard limit "
            "(RLIMIT_NOFILE, ulimit -Hn)"
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))


VARIABLE = "RALLYPOINT_TCP_CONGESTION"
_PERMITTED = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
_LONGEST_NAME = 15  # TCP_CA_NAME_MAX without its end
_MIN_RTT = slice(148, 152)  # tcpi_min_rtt, within struct tcp_info


class Congestion:
    """The congestion control of a group's connections: by the user, or by the length of a path.

    BBR sends at the rate that it estimates for a path, and on paths as short as those within a
    cluster its estimate is half of the real rate (docs/decisions/046-tcp.md). So where a machine
    uses BBR by default, connections start with Reno, which every kernel has and every user may use,
    and switch to BBR if a round trip takes long. The opposite order does not work: a connection
    that started with BBR remains paced. Source: tcp(7), TCP_CONGESTION; struct tcp_info in
    linux/tcp.h; net/ipv4/tcp_bbr.c, bbr_init.

    Args:
        short_us: round trips up to this use Reno; by default those within a building.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, *, short_us: int = 1000) -> None:
        self._short_us = short_us
        self._left = ""  # what was usual here
        self._wished = environ.get(VARIABLE, "")
        if len(self._wished) > _LONGEST_NAME or not (self._wished + "a").isidentifier():
            raise InvalidArgumentError(
                f"{VARIABLE}={self._wished!r} must name a congestion control algorithm, such as "
                "cubic or bbr"
            )

    def prepare(self, sock: socket.socket) -> None:
        """Prepare a socket before it connects, or a listener."""
        usual = control_of(sock)
        if self._wished:
            try:
                _set(sock, self._wished)
            except OSError as error:
                raise HostError(
                    f"{VARIABLE}={self._wished}: {error.strerror}; permitted here: {_permitted()}"
                ) from None
        elif usual.startswith("bbr"):
            _set(sock, "reno")
            self._left = usual

    @property
    def names(self) -> tuple[str, str]:
        """What a prepared connection starts with, and switches to if its round trip is long."""
        return self._wished or ("reno" if self._left else ""), self._left

    def settle(self, sock: socket.socket) -> None:
        """Make the final choice for a connected socket."""
        if self._left and _round_trip_us(sock) >= self._short_us:
            _set(sock, self._left)


def control_of(sock: socket.socket) -> str:
    """The name of a connection's congestion control."""
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LONGEST_NAME + 1)
    return name.rstrip(b"\0").decode()


def _set(sock: socket.socket, name: str) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def _round_trip_us(sock: socket.socket) -> int:
    """The shortest round trip that the kernel has measured."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.stop)
    return int.from_bytes(info[_MIN_RTT], "little")


def _permitted() -> str:
    try:
        return ", ".join(Path(_PERMITTED).read_text().split())
    except OSError:
        return f"see {_PERMITTED}"


AnyError = TypeVar("AnyError", bound=RallypointError)


class NetworkDiagnosis:
    """Examines once, for at most two seconds, why another side is not connected."""

    def __init__(self) -> None:
        self._has_begun = False
        self._found = ""

    def begin(self, host: str, port: int, *, role: str, is_caller: bool) -> None:
        """The same as `run`, in a thread, while the others are still running."""
        where = {"role": role, "is_caller": is_caller}
        threading.Thread(target=self.run, args=(host, port), kwargs=where, daemon=True).start()

    def run(self, host: str, port: int, *, role: str, is_caller: bool = True) -> None:
        """Examine now, unless that was done before or the network is not involved.

        Args:
            role: what listens at `host` and `port`, on the other side.
            is_caller: this rank had to connect; otherwise the other one.
        """
        if self._has_begun or is_loopback(host):
            return
        self._has_begun = True
        from rallypoint.doctor.quick import finding_about  # slow, and seldom wanted

        peers = [(host, port)]
        self._found = finding_about(peers, os.environ, count=2, role=role, is_caller=is_caller)

    def added_to(self, error: AnyError) -> AnyError:
        """The error, with the finding added."""
        if self._found:
            from rallypoint.doctor.quick import told_with

            error.args = (told_with(str(error), self._found),)
        return error


def raise_with_finding(error: StoreConnectionError) -> NoReturn:
    """Raise an error again with a finding: the store of a forming group cannot be reached."""
    host, _, port = (error.endpoint or "").rpartition(":")
    diagnosis = NetworkDiagnosis()
    if port.isdecimal() and not isinstance(error, StoreRefusedError):
        diagnosis.run(host.strip("[]"), int(port), role="where the store is")
    raise diagnosis.added_to(error)
