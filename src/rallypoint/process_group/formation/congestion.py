"""The congestion control of connections between hosts.

BBR sends at the rate that it estimates for a path, and on paths as short as those within a cluster
its estimate is half of the real rate (docs/decisions/046-tcp.md). So where a machine uses BBR by
default, connections start with Reno, which every kernel has and everybody may use, and switch to
BBR if a round trip takes long. The opposite order does not work: a connection that started with BBR
remains paced. Source: tcp(7), TCP_CONGESTION; struct tcp_info in linux/tcp.h; net/ipv4/tcp_bbr.c,
bbr_init.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from rallypoint.base.errors import HostError, InvalidArgumentError

VARIABLE = "RALLYPOINT_TCP_CONGESTION"
_PERMITTED = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
_LONGEST_NAME = 15  # TCP_CA_NAME_MAX without its end
_MIN_RTT = slice(148, 152)  # tcpi_min_rtt, within struct tcp_info


class Congestion:
    """The choice for the connections of a group: by the user, or by the length of a path.

    Args:
        short_us: round trips up to this use Reno; by default those within a building.

    Raises:
        InvalidArgumentError: the user's value is not a name.
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
        """Prepare a socket before it connects, or a listener.

        Raises:
            HostError: the kernel does not have or permit the user's choice.
        """
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
