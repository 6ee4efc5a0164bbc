"""The client of a key-value server, ours or torch's, under torch's name and with its signature.

Against our server each operation is at most one round trip, for a thousand keys; against torch's it
uses the stock sequences. Every operation ends within its timeout, with an error that names server,
operation and key. A client runs one operation at a time over its connection. While one waits,
those of other threads, and of a signal handler that has interrupted it, use a further connection.
"""

from __future__ import annotations

import os
import struct
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.base.errors import StoreConnectionError, StoreError, StoreTimeoutError
from rallypoint.store import wire
from rallypoint.store.connection import Connection, connect
from rallypoint.store.session import Session, Watch
from rallypoint.store.store import (
    DEFAULT_TIMEOUT,
    EphemeralStore,
    check_values,
    empty_queue,
    first_of,
    seconds_of,
)
from rallypoint.store.wire import pack_count, pack_key, pack_keys, pack_number, pack_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.server import StoreServer

_I64 = struct.Struct("<q")
_U8 = struct.Struct("<B")
_IN_A_ROW = 1000  # requests in a row, so that neither side has to hold much
_WORKERS = b"init/"  # no slash before it: users' keys cannot collide


class TCPStore(EphemeralStore):
    """A store behind a TCP server.

    Args:
        host_name: the server's address or name.
        port: the server's port; with `is_master`, 0 takes a free one.
        world_size: how many clients there will be, if that is known.
        is_master: also run the server, in this process.
        timeout: how long each operation may take by default.
        wait_for_workers: with `world_size`, the master waits until that many clients have
            connected.
        multi_tenant: share one server per port with the other masters of this process.
        master_listen_fd: a bound socket for the server to take over.
        use_libuv: accepted for torch's sake; there is one kind of server.
        token: a secret that the server and all of its clients must know.

    Raises:
        StoreConnectionError: the server cannot be reached, or started.
        StoreTimeoutError: not all workers connected in time.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        token: bytes | None = None,
    ) -> None:
        super().__init__(timeout)
        timeout_s = seconds_of(timeout)
        self._server: StoreServer | None = None
        self._token = token
        self._round: tuple[str, int] | None = None
        if is_master:
            self._server = _start_server(
                host_name, port, master_listen_fd, token, is_shared=multi_tenant
            )
            port = self._server.port if self._server else port
        self.host: str = host_name
        self.port: int = port
        self._endpoint = endpoint_of(host_name, port)
        self._own = Session(connect(host_name, port, timeout_s, token), timeout_s)
        self._beside: TCPStore | None = None
        if world_size is not None and wait_for_workers:
            self._count_in(world_size, wait=is_master)

    @property
    def _session(self) -> Session:
        """One whose turn it is."""
        if not self._own.is_busy:
            return self._own
        if self._beside is None:
            self._beside = self.clone()
        return self._beside._session

    def _post(self, operation: str, key: str | None, request: bytes) -> None:
        session = self._session
        session.post(operation, key, request)
        if session is not self._own:  # it is to be served before what follows there
            session.exchange_number("num_keys", None, b"\x07", _I64)

    def _count_in(self, world_size: int, *, wait: bool) -> None:
        joined = self._add(_WORKERS, 1)
        deadline = time.monotonic() + self._own.timeout_s
        pause_s = 0.001
        while wait and joined < world_size:
            if time.monotonic() >= deadline:
                raise StoreTimeoutError(
                    f"{joined} of {world_size} clients joined the store at {self._endpoint} "
                    f"within {self._own.timeout_s:g} s; look for the first error of the others",
                    endpoint=self._endpoint,
                    operation="wait_for_workers",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
            joined = self._add(_WORKERS, 0)

    @property
    def is_ours(self) -> bool:
        """Whether the server is Rallypoint's, which can do more than torch's."""
        return self._own.ours

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations wait."""
        super().set_timeout(timeout)
        self._own.timeout_s = seconds_of(timeout)
        if self._beside is not None:
            self._beside.set_timeout(timeout)

    # Keys.

    def set(self, key: str, value: str | bytes) -> None:
        """See Store. There is no reply: a failure shows in the next operation."""
        request = b"\x01" + pack_key(key) + pack_value(key, value)
        self._post("set", key, request)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        request = b"\x04" + pack_key(key) + pack_number("add", amount)
        return self._session.exchange_number("add", key, request, _I64)

    def _add(self, raw_key: bytes, amount: int) -> int:
        request = b"\x04" + wire.blob(raw_key) + wire.i64(amount)
        return self._session.exchange_number("add", raw_key.decode(), request, _I64)

    def append(self, key: str, value: str | bytes) -> None:
        """See Store. There is no reply: a failure shows in the next operation."""
        self._post("append", key, b"\x09" + pack_key(key) + pack_value(key, value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        request = b"\x02" + pack_key(key) + pack_value(key, expected) + pack_value(key, desired)
        return self._session.exchange("compare_set", key, request, Connection.receive_blob)

    def check(self, keys: Sequence[str]) -> bool:
        request = b"\x05" + pack_keys(keys)
        return self._session.exchange_number("check", first_of(keys), request, _U8) == wire.READY

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = seconds_of(timeout) if timeout is not None else self._own.timeout_s
        self._session.wait(
            "wait", keys, b"\x06" + pack_keys(keys), Connection.receive_u8, timeout_s
        )

    def delete_key(self, key: str) -> bool:
        return self._session.exchange_number("delete_key", key, b"\x08" + pack_key(key), _I64) > 0

    def delete_keys(self, keys: Sequence[str]) -> int:
        """See Store. Requests are sent in a row, and their replies read then."""
        deleted = 0
        for start in range(0, len(keys), _IN_A_ROW):
            few = keys[start : start + _IN_A_ROW]
            request = b"".join(b"\x08" + pack_key(key) for key in few)
            read = partial(_receive_numbers, len(few))
            deleted += self._session.exchange("delete_keys", few[0], request, read)
        return deleted

    def num_keys(self) -> int:
        """See Store. The key that counts the workers is one of them."""
        return self._session.exchange_number("num_keys", None, b"\x07", _I64)

    def list_keys(self) -> list[str]:
        raw = self._session.exchange("list_keys", None, b"\x11", _receive_list)
        return [key[1:].decode(errors="surrogateescape") for key in raw if key.startswith(b"/")]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        count, packed = len(keys), pack_keys(keys)
        operation = "get" if count == 1 else "multi_get"

        def read(connection: Connection) -> list[bytes]:
            return [connection.receive_blob() for _ in range(count)]

        if self.is_ours:
            return self._session.wait(operation, keys, b"\x40" + packed, read, self._own.timeout_s)
        self._session.wait(
            operation, keys, b"\x06" + packed, Connection.receive_u8, self._own.timeout_s
        )
        return self._session.exchange(operation, first_of(keys), b"\x0a" + packed, read)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """See Store. There is no reply: a failure shows in the next operation."""
        check_values(keys, values)
        parts = [pack_key(k) + pack_value(k, v) for k, v in zip(keys, values, strict=True)]
        request = b"\x0b" + pack_count(parts) + b"".join(parts)
        self._post("multi_set", first_of(keys), request)

    # Queues and barriers.

    def queue_push(self, key: str, value: str | bytes) -> None:
        """See Store. There is no reply: a failure shows in the next operation."""
        self._post("queue_push", key, b"\x0e" + pack_key(key) + pack_value(key, value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        packed = pack_key(key)
        if block and self.is_ours:
            request = b"\x41" + packed
            return self._session.wait(
                "queue_pop", [key], request, Connection.receive_blob, self._own.timeout_s
            )
        deadline = time.monotonic() + self._own.timeout_s
        while True:
            if block:
                left_s = max(deadline - time.monotonic(), 0.001)
                request = b"\x06" + pack_keys([key])
                self._session.wait("queue_pop", [key], request, Connection.receive_u8, left_s)
            value = self._session.exchange("queue_pop", key, b"\x0f" + packed, _receive_popped)
            if value is not None:
                return value
            # torch's server: between the two requests another client may have taken it.
            if not block:
                raise empty_queue(key, self._endpoint)

    def queue_len(self, key: str) -> int:
        return self._session.exchange_number("queue_len", key, b"\x10" + pack_key(key), _I64)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        timeout_s = seconds_of(timeout) if timeout is not None else self._own.timeout_s
        request = b"\x12" + pack_key(key) + pack_number("barrier", world_size)
        self._session.wait("barrier", [key], request, Connection.receive_u8, timeout_s)

    # What only our server can do.

    def set_ephemeral(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key` until this connection ends, however it ends.

        If the key is set again later, by any client, it stays.

        Raises:
            StoreError: the server is not ours.
        """
        self._require_ours("set_ephemeral", key)
        self._post("set_ephemeral", key, b"\x42" + pack_key(key) + pack_value(key, value))

    def enter(self, namespace: str, number: int) -> None:
        """Join a round: from now on this store holds that round's keys and no others.

        The first client to enter a round with a higher number ends the previous one: its keys are
        deleted, and clients that still use it get a StoreFencedError.

        Raises:
            StoreFencedError: the round is over already.
            StoreError: the server is not ours.
        """
        self._require_ours("enter", namespace)
        request = b"\x44" + pack_key(namespace) + pack_number("enter", number)
        self._session.exchange_number("enter", namespace, request, _I64)
        self._round = (namespace, number)

    def watch(self, prefix: str) -> Watch:
        """Watch all keys that begin with `prefix`, over its own connection.

        Raises:
            StoreError: the server is not ours.
        """
        self._require_ours("watch", prefix)
        connection = connect(self.host, self.port, self._own.timeout_s, self._token)
        session = Session(connection, self._own.timeout_s)
        if self._round is not None:
            request = b"\x44" + pack_key(self._round[0]) + pack_number("enter", self._round[1])
            session.exchange_number("enter", self._round[0], request, _I64)
        return Watch(connection, prefix)

    def _require_ours(self, operation: str, key: str) -> None:
        if not self.is_ours:
            raise StoreError(
                f"{operation} of {key!r} needs a Rallypoint server and the one at "
                f"{self._endpoint} is PyTorch's; start one with `rallypoint store`",
                endpoint=self._endpoint,
                operation=operation,
                key=key,
            )

    # The handle.

    def clone(self) -> TCPStore:
        """See Store. A new connection, which does not count as a worker."""
        other = TCPStore(
            self.host, self.port, timeout=self._timeout, wait_for_workers=False, token=self._token
        )
        if self._round is not None:
            other.enter(*self._round)
        return other

    def interrupt(self) -> None:
        """End an operation of another thread with StoreConnectionError, and all later ones."""
        self._own.interrupt()
        if self._beside is not None:
            self._beside.interrupt()

    def close(self) -> None:
        """Close the connections, and the server if it runs here."""
        self._own.close()
        if self._beside is not None:
            self._beside.close()
        server, self._server = self._server, None
        if server is not None and _shared.get(server.port) is not server:
            server.close()  # a shared server ends with the last of its masters


# The servers of masters with multi_tenant, by port.
_shared: weakref.WeakValueDictionary[int, StoreServer] = weakref.WeakValueDictionary()


def _start_server(
    host: str, port: int, listen_fd: int | None, token: bytes | None, *, is_shared: bool
) -> StoreServer | None:
    """Start the server, or leave it to the launcher's agent if that has the port (torch's rule)."""
    if is_shared and (shared := _shared.get(port)) is not None:
        return shared
    from rallypoint.store.server import StoreServer  # a launcher's workers have none

    try:
        server = StoreServer(_listen_host(host), port, listen_fd=listen_fd, token=token)
    except StoreConnectionError:
        agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") in {"1", "True"}
        if agent_has_it and os.environ.get("MASTER_PORT") == str(port):
            return None
        raise
    if is_shared:
        _shared[server.port] = server
    return server


def _listen_host(host: str) -> str:
    """Listen on loopback only if that is where clients will look, else on every interface."""
    if is_loopback(host):
        return "::1" if host == "::1" else "127.0.0.1"
    return "::"


def _receive_numbers(count: int, connection: Connection) -> int:
    """The sum of this many replies; the status of the first has been read."""
    total = connection.receive_i64()
    for _ in range(count - 1):
        if connection.ours:
            connection.receive_u8()
        total += connection.receive_i64()
    return total


def _receive_list(connection: Connection) -> list[bytes]:
    return [connection.receive_blob() for _ in range(connection.receive_i64())]


def _receive_popped(connection: Connection) -> bytes | None:
    return connection.receive_blob() if connection.receive_i64() > 0 else None
