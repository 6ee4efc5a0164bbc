"""Handing out a region: to ranks that have no place for it, and by one that says nothing."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time

import pytest

from rallypoint.base.errors import (
    CollectiveTimeoutError,
    HostError,
    PeerLostError,
    SystemCallError,
)
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


def test_a_rank_without_descriptors_blames_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region comes, and there is no place for it: the first rank is well."""
    owner = SegmentOwner(4096)
    offer, deadline = owner.offer, time.monotonic() + 60
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    has_come = threading.Event()

    def hand_out() -> None:
        assert owner._listener is not None
        connection, _ = owner._listener.accept()
        owner._admit(connection, connection.recv(segment._HELLO_BYTES), {1: 1})
        has_come.set()

    def take_away_descriptors(*_: object) -> None:
        has_come.wait()
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))

    monkeypatch.setattr(segment, "_await", take_away_descriptors)
    thread = threading.Thread(target=hand_out)
    thread.start()
    try:
        with pytest.raises(SystemCallError, match="ran out of file descriptors") as info:
            join_segment(offer, 1, deadline, lambda fd: fd, lambda _: 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        thread.join()
        owner.close()
    assert (info.value.call, info.value.errno) == ("recvmsg", errno.EMFILE)


def test_a_rank_that_is_alone_needs_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", refuse)
    owner = SegmentOwner(4096)
    with pytest.raises(SystemCallError, match="Unix sockets are refused"):
        owner.offer  # noqa: B018 - it opens the socket
    owner.close()


def test_a_first_rank_that_ends_or_does_not_finish() -> None:
    """It gives the region, and then says nothing, or something else."""

    def give(listener: socket.socket, answer: bytes | None) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(64)
            fd = os.memfd_create("test")
            socket.send_fds(connection, [b"x"], [fd])
            os.close(fd)
            connection.recv(1)
            if answer is None:
                is_over.wait()
            else:
                connection.sendall(answer)

    for answer, kind, words, left_s in (
        (b"", PeerLostError, "rank 0 ended or gave up before the group was complete", 60.0),
        (b"?", PeerLostError, "rank 0 ended or gave up before the group was complete", 60.0),
        (None, CollectiveTimeoutError, "rank 0 joined but did not finish within the timeout", 0.1),
    ):
        is_over = threading.Event()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            name = f"rallypoint-test-{os.urandom(8).hex()}"
            listener.bind("\0" + name)
            listener.listen()
            thread = threading.Thread(target=give, args=(listener, answer))
            thread.start()
            deadline = time.monotonic() + left_s
            with pytest.raises(kind, match=words) as raised:
                join_segment(Offer(name, bytes(16)), 1, deadline, lambda fd: fd, lambda _: 0)
            is_over.set()
            thread.join()
        assert raised.value.rank == 0


def test_a_first_rank_that_is_elsewhere() -> None:
    offer = Offer(f"rallypoint-test-{os.urandom(8).hex()}", bytes(16))
    with pytest.raises(HostError, match="cannot share memory with rank 0: it runs on another mach"):
        join_segment(offer, 1, time.monotonic() + 60, os.dup, lambda _: 0)


def test_many_ranks_in_words() -> None:
    assert segment._ranks([0, 3]) == "0, 3"
    assert segment._ranks(list(range(20))) == (
        "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 4 more"
    )
