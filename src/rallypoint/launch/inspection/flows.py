"""The kernel's data on connections between workers on different hosts (sock_diag(7)).

Data that a peer has not acknowledged for a while, although they were sent again, indicate a network
that drops them. Reading this needs no rights, and no help from the processes.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rallypoint.diagnosis.facts import Flow

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_ERROR, _DONE = 2, 3
_INFO = 2  # INET_DIAG_INFO: a struct tcp_info follows
_ESTABLISHED = 1 << 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_MESSAGE = struct.Struct("=24x16s12x8xI4xI")  # inet_diag_msg: the peer, bytes that wait, the inode
_ATTRIBUTE = struct.Struct("=HH")
# tcp_info: the number of retransmissions; milliseconds since data, and since an acknowledgement,
# arrived.
_TCP_INFO = struct.Struct("=2xB49xII")
_CHUNK = 1 << 16
_PATIENCE_S = 0.2


@dataclass(frozen=True, slots=True)
class _Connection:
    inode: int
    peer: str
    unacknowledged_bytes: int
    retransmits: int
    silent_s: float


def waiting_flows(pids: Mapping[int, int]) -> tuple[Flow, ...]:
    """The connections to other hosts in which these workers' data are unacknowledged.

    Args:
        pids: process -> rank.
    """
    waiting = {each.inode: each for each in _connections() if each.unacknowledged_bytes}
    if not waiting:
        return ()
    return tuple(
        Flow(
            rank=rank,
            peer=found.peer,
            unacknowledged_bytes=found.unacknowledged_bytes,
            retransmits=found.retransmits,
            stalled_s=found.silent_s,
        )
        for pid, rank in pids.items()
        for inode in _sockets(pid)
        if (found := waiting.get(inode)) is not None
    )


def _connections() -> Iterator[_Connection]:
    """All TCP connections of this network namespace to other hosts."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
                kernel.settimeout(_PATIENCE_S)
                request = _REQUEST.pack(
                    family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED
                )
                size = _HEADER.size + len(request)
                kernel.send(_HEADER.pack(size, _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
                yield from _answers(kernel, family)
        except (OSError, struct.error):  # a kernel, or a sandbox, without it
            continue


def _answers(kernel: socket.socket, family: int) -> Iterator[_Connection]:
    while True:
        data = kernel.recv(_CHUNK)
        while len(data) >= _HEADER.size:
            size, kind, *_ = _HEADER.unpack_from(data)
            if kind in (_ERROR, _DONE) or size < _HEADER.size:
                return
            found = _connection(data[_HEADER.size : size], family)
            if found is not None:
                yield found
            data = data[-(-size // 4) * 4 :]


def _connection(message: bytes, family: int) -> _Connection | None:
    remote, waiting, inode = _MESSAGE.unpack_from(message)
    peer = ipaddress.ip_address(remote[: 4 if family == socket.AF_INET else 16])
    if isinstance(peer, ipaddress.IPv6Address) and peer.ipv4_mapped:
        peer = peer.ipv4_mapped
    if peer.is_loopback:
        return None
    rest = message[_MESSAGE.size :]
    while len(rest) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        if kind == _INFO and min(size, len(rest)) >= _ATTRIBUTE.size + _TCP_INFO.size:
            retransmits, data_ms, acknowledged_ms = _TCP_INFO.unpack_from(rest, _ATTRIBUTE.size)
            silent_s = min(data_ms, acknowledged_ms) / 1000
            return _Connection(inode, str(peer), waiting, retransmits, silent_s)
        rest = rest[max(4, -(-size // 4) * 4) :]
    return None


def _sockets(pid: int) -> Iterator[int]:
    directory = f"/proc/{pid}/fd"
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"{directory}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])
