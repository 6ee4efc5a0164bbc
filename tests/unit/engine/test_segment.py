"""Handing out a region: a first rank that holds a connection and says nothing."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from rallypoint.base.errors import PeerLostError
from rallypoint.engine import segment
from rallypoint.engine.segment import Offer, SegmentOwner, join_segment


def test_who_joins_looks_whether_the_first_rank_is_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt within accept() leaves the connection open, and nobody who would answer."""
    monkeypatch.setattr(segment, "_CHECK_EVERY_S", 0.02)
    looks: list[float] = []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise PeerLostError("rank 0 is gone", rank=0, operation="init_process_group")

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"rallypoint-test-{os.urandom(8).hex()}"
        listener.bind("\0" + name)
        listener.listen()
        deadline = time.monotonic() + 600
        with pytest.raises(PeerLostError, match="rank 0 is gone"):
            join_segment(Offer(name, bytes(16)), 1, deadline, lambda fd: fd, lambda _: 0, look)
    assert len(looks) == 3


def test_strangers_that_say_nothing_keep_nobody_out() -> None:
    owner = SegmentOwner(1 << 12)
    strangers = []
    for count in range(2 * segment._MOST_STRANGERS):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect("\0" + owner.offer.address)
        stranger.send(bytes(count % 21))  # some begin to say something, or say what is wrong
        strangers.append(stranger)
    deadline = time.monotonic() + 60
    joined: list[tuple[int, int]] = []

    def join() -> None:
        joined.append(join_segment(owner.offer, 1, deadline, os.dup, lambda _: 5))

    thread = threading.Thread(target=join)
    thread.start()
    assert owner.hand_out({1: 1}, deadline, lambda: 7) == 5
    thread.join()
    ((fd, reach),) = joined
    assert (os.fstat(fd).st_size, reach) == (1 << 12, 5)
    os.close(fd)
    owner.close()
    for each in strangers:
        each.close()
