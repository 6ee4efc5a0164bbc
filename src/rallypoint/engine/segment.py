"""Passes the shared region of a communicator from a host's first rank to the others.

The region is a memfd (base/memory_file.py): it has no name in /dev/shm, is not limited by the size
of /dev/shm, and disappears with the last process that holds it. Its descriptor is passed over an
abstract Unix socket, whose random name and secret the first rank gives to the others through the
store.

    others secret, rank -> mapped -> reach -> first <- descriptor <- go <- what is in reach of all

Once all have mapped it, each rank determines which memory of the others it can read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import select
import selectors
import socket
import time
from _operator import _compare_digest  # hmac has it too, but loads OpenSSL, which takes 3 ms
from collections.abc import Callable, Mapping
from typing import TypeVar

from rallypoint.base.errors import CollectiveTimeoutError, HostError, PeerLostError
from rallypoint.base.memory_file import memory_file
from rallypoint.base.record import Record

Mapped = TypeVar("Mapped")

SECRET_BYTES = 16
_HELLO_BYTES = SECRET_BYTES + 4  # and the rank's number
_MOST_STRANGERS = 64  # that have not sent the secret yet
_CHECK_EVERY_S = 1.0
_MAPPED, _GO = b"m", b"g"
_REACHES = bytes(range(8))
_F_ADD_SEALS, _SEALS = 1033, 0x0001 | 0x0002 | 0x0004  # forbid further seals, shrinking, growing


class Offer(Record):
    """Where the first rank hands out the region, and the secret that a rank must present."""

    address: str
    secret: bytes


class SegmentOwner:
    """The first rank's side: creates the region and hands it to the others."""

    def __init__(self, nbytes: int) -> None:
        self.fd = memory_file("rallypoint", nbytes)
        with contextlib.suppress(OSError):  # only a memfd can be sealed
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
        self._members: dict[int, socket.socket] = {}
        self._listener: socket.socket | None = None

    @functools.cached_property
    def offer(self) -> Offer:
        """From now on, others can fetch the region: nothing is opened for a rank that is alone."""
        self._listener = _unix_socket()
        address = f"rallypoint-{os.urandom(12).hex()}"
        self._listener.bind("\0" + address)
        self._listener.listen(4096)
        return Offer(address, os.urandom(SECRET_BYTES))

    def hand_out(
        self,
        others: Mapping[int, int],
        deadline: float,
        probe: Callable[[], int],
        check: Callable[[], None] = lambda: None,
    ) -> int:
        """Give the region to the other ranks of this host and wait until each has mapped it.

        They know its `offer`. `others` has each rank's number in messages. Returns for each rank,
        for this one from `probe()`, which memory of all others it can read: bits below 8. `check`
        is called every second until all have arrived, and may raise.
        """
        with selectors.DefaultSelector() as selector:
            self._admit_all(selector, others, deadline, check)
        for rank, connection in self._members.items():
            _expect(connection, _MAPPED, deadline, others[rank], check)
        self._send_all(_GO)
        reach = probe()
        for rank, connection in self._members.items():
            reach &= _expect(connection, _REACHES, deadline, others[rank], check)[0]
        self._send_all(bytes([reach]))
        return reach

    def _send_all(self, byte: bytes) -> None:
        for connection in self._members.values():
            # Its death will become visible in the first operation.
            with contextlib.suppress(OSError):
                connection.sendall(byte)

    def _admit_all(
        self,
        selector: selectors.BaseSelector,
        others: Mapping[int, int],
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        """Give the region to all other ranks. Silent strangers delay no rank."""
        strangers: dict[socket.socket, bytes] = {}  # what each has said, the oldest first

        def release(connection: socket.socket) -> socket.socket:
            selector.unregister(connection)
            del strangers[connection]
            return connection

        assert self._listener is not None
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ)
        try:
            while len(self._members) < len(others):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._late(others)
                ready = selector.select(min(left_s, _CHECK_EVERY_S))
                if not ready:
                    check()
                for connection in (key.fileobj for key, _ in ready):
                    assert isinstance(connection, socket.socket)
                    if connection is self._listener:
                        with contextlib.suppress(ConnectionError, BlockingIOError):  # it is gone
                            new, _ = self._listener.accept()
                            new.setblocking(False)
                            selector.register(new, selectors.EVENT_READ)
                            strangers[new] = b""
                    elif connection in strangers:
                        hello = strangers[connection] = _hello(connection, strangers[connection])
                        if not hello:
                            release(connection).close()
                        elif len(hello) == _HELLO_BYTES:
                            self._admit(release(connection), hello, others)
                    if len(strangers) > _MOST_STRANGERS:
                        release(next(iter(strangers))).close()
        finally:
            for connection in list(strangers):
                release(connection).close()

    def _admit(self, connection: socket.socket, hello: bytes, others: Mapping[int, int]) -> None:
        """Give the region to a rank that has sent the secret."""
        rank = int.from_bytes(hello[SECRET_BYTES:], "little")
        try:
            is_known = _compare_digest(hello[:SECRET_BYTES], self.offer.secret)
            if not is_known or rank not in others or rank in self._members:
                raise ConnectionError
            connection.setblocking(True)
            socket.send_fds(connection, [b"\0"], [self.fd])
        except OSError:
            connection.close()
            return
        self._members[rank] = connection

    def _late(self, others: Mapping[int, int]) -> CollectiveTimeoutError:
        missing = sorted(others[rank] for rank in set(others) - set(self._members))
        return CollectiveTimeoutError(
            f"init_process_group: {len(self._members) + 1} of {len(others) + 1} ranks of "
            f"this host joined; missing: {_ranks(missing)}; check that their processes "
            "are running",
            rank=missing[0],
            operation="init_process_group",
        )

    def close(self) -> None:
        """Close the sockets and the descriptor; mappings stay."""
        if self._listener is not None:
            self._listener.close()
        for connection in self._members.values():
            connection.close()
        os.close(self.fd)


def join_segment(
    offer: Offer,
    rank: int,
    deadline: float,
    attach: Callable[[int], Mapped],
    probe: Callable[[Mapped], int],
    check: Callable[[], None] = lambda: None,
    *,
    first: int = 0,
) -> tuple[Mapped, int]:
    """Fetch the region, map it with `attach(fd)`, and wait until all ranks have done so.

    Returns what was mapped, and for each rank, for this one from `probe(mapped)`, which memory of
    all others it can read: bits below 8. `check` is called every second meanwhile, and may raise: a
    first rank that was interrupted while accepting the connection may keep it open forever.
    `first` is that rank's number in messages.
    """
    with _unix_socket() as connection:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection.connect("\0" + offer.address)
        except ConnectionRefusedError:
            raise HostError(
                f"cannot share memory with rank {first}: it runs on another machine or in another "
                "container network, or has just ended"
            ) from None
        try:
            connection.sendall(offer.secret + rank.to_bytes(4, "little"))
            _await(connection, deadline, check)
            data, fds, flags, _ = socket.recv_fds(connection, 1, 1)
        except OSError:  # or a TimeoutError
            data, fds, flags = b"", [], 0
        if flags & socket.MSG_CTRUNC:  # it came, and there was no place for it
            for fd in fds:
                os.close(fd)
            from rallypoint.base.refusals import refused  # only then

            raise refused("recvmsg", errno.EMFILE)
        if not data or not fds:
            raise PeerLostError(
                f"rank {first} closed the connection before the group was complete",
                rank=first,
                operation="init_process_group",
            )
        try:
            mapped = attach(fds[0])
        finally:
            os.close(fds[0])
        with contextlib.suppress(OSError):  # the next line will report it
            connection.sendall(_MAPPED)
        _expect(connection, _GO, deadline, first, check)
        with contextlib.suppress(OSError):
            connection.sendall(bytes([probe(mapped)]))
        return mapped, _expect(connection, _REACHES, deadline, first, check)[0]


def _unix_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        from rallypoint.base.refusals import UNIX_SOCKET, refused  # only then

        raise refused(UNIX_SOCKET, error.errno or 0) from None


def _await(connection: socket.socket, deadline: float, check: Callable[[], None]) -> None:
    """Wait for something to read, or an end of file; raises TimeoutError at the deadline."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        left_s = max(deadline - time.monotonic(), 0.001)
        if poll.poll(1000 * min(left_s, _CHECK_EVERY_S)):
            return
        if left_s <= _CHECK_EVERY_S:
            raise TimeoutError
        check()


def _expect(
    connection: socket.socket,
    accepted: bytes,
    deadline: float,
    peer: int,
    check: Callable[[], None],
) -> bytes:
    try:
        _await(connection, deadline, check)
        byte = connection.recv(1)
        if not byte or byte not in accepted:
            raise ConnectionError
    except TimeoutError:
        raise CollectiveTimeoutError(
            f"init_process_group: rank {peer} joined but did not finish within the timeout",
            rank=peer,
            operation="init_process_group",
        ) from None
    except OSError:
        raise PeerLostError(
            f"init_process_group: rank {peer} ended or gave up before the group was complete",
            rank=peer,
            operation="init_process_group",
        ) from None
    return byte


def _hello(connection: socket.socket, before: bytes) -> bytes:
    """A stranger's hello as far as it has been received; empty if the connection has ended."""
    try:
        data = connection.recv(_HELLO_BYTES - len(before))
    except OSError:
        return b""
    return before + data if data else b""


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return shown if len(ranks) <= 16 else f"{shown} and {len(ranks) - 16} more"
