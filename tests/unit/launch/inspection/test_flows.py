"""What sock_diag(7) answers of a connection, in the layout of linux/inet_diag.h and linux/tcp.h."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from rallypoint.launch.inspection.flows import _connection, waiting_flows


def message(peer: str, *, waiting: int, again: int, data_ms: int, acknowledged_ms: int) -> bytes:
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    address = socket.inet_pton(family, peer).ljust(16, b"\0")
    told = struct.pack("=BBBB", family, 1, 0, 0)
    told += struct.pack(">HH", 40000, 50000) + bytes(16) + address
    told += struct.pack("=IQ", 0, 77)
    told += struct.pack(
        "=IIIII", 200, 0, waiting, 1000, 4711
    )  # expires, rqueue, wqueue, uid, inode
    told += struct.pack("=HH", 8, 1) + bytes(4)  # another attribute comes first
    info = struct.pack("=BBBBBBBB", 1, 0, again, 0, 0, 0, 0, 0) + struct.pack("=9I", *[9] * 9)
    info += struct.pack("=4I", 5, 0, data_ms, acknowledged_ms) + bytes(40)
    return told + struct.pack("=HH", 4 + len(info), 2) + info


@pytest.mark.parametrize("peer", ["10.77.0.2", "fd00::2"])
def test_a_connection_in_which_data_wait(peer: str) -> None:
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    told = message(peer, waiting=640, again=3, data_ms=9000, acknowledged_ms=4200)
    found = _connection(told, family)
    assert found is not None
    assert (found.inode, found.peer, found.unacknowledged_bytes) == (4711, peer, 640)
    assert (found.retransmits, found.silent_s) == (3, 4.2)
    assert _connection(told[:100], family) is None


def test_peers_on_this_host_are_left_out() -> None:
    for family, peer in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")):
        told = message(peer, waiting=1, again=1, data_ms=9, acknowledged_ms=9)
        assert _connection(told, family) is None
    mapped = message("::ffff:10.0.0.9", waiting=1, again=1, data_ms=9, acknowledged_ms=9)
    found = _connection(mapped, socket.AF_INET6)
    assert found is not None
    assert found.peer == "10.0.0.9"


def test_the_kernel_is_understood_here() -> None:
    assert waiting_flows({os.getpid(): 0, 2**22 + 1: 1}) == ()
