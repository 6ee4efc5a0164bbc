"""A store in a file that all processes see: a log under flock, replayed by each (file_log.py).

The file is opened for each operation, as NFS requires. The last member to leave removes it. A file
left by a crashed run is recognised by its run id, or because all its members are dead, and is never
silently reused. It works on NFS wherever flock does (Linux 2.6.12 and later).
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from rallypoint.base.errors import (
    InvalidArgumentError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)
from rallypoint.base.regular_file import open_regular
from rallypoint.store.counters import number_in, wrapped
from rallypoint.store.file_log import (
    MAGIC,
    Change,
    ChangeKind,
    LogState,
    decode_header,
    decode_records,
    encode_header,
    encode_record,
)
from rallypoint.store.member import Liveness, identity, liveness_of
from rallypoint.store.store import (
    DEFAULT_TIMEOUT,
    Store,
    empty_queue,
    encode_key,
    encode_value,
    seconds_of,
)

T = TypeVar("T")

_POLL_S = 0.01


class FileStore(Store):
    """A store in the file `file_name`, which the first process creates.

    Args:
        file_name: a path on a file system that all processes share; its folder exists.
        world_size: how many processes will open it; the last of them to close it removes it. -1
            if that is not known; then it stays.
        timeout: how long each operation may take unless told otherwise.
        run_id: what tells this run from others that might have used the same name.
        reset_stale: empty a file of another run instead of refusing it.

    Raises:
        StoreError: the file is of another run, or of a full one.
        StoreConnectionError: the file cannot be opened.
    """

    def __init__(
        self,
        file_name: str,
        world_size: int = -1,
        *,
        timeout: timedelta = DEFAULT_TIMEOUT,
        run_id: str = "",
        reset_stale: bool = False,
    ) -> None:
        super().__init__(timeout)
        self.path: str = os.fspath(file_name)
        self._world_size = world_size
        self._run_id = run_id
        self._reset_stale = reset_stale
        self._lock = threading.RLock()
        self._is_open = False
        self._contents = LogState()
        self._replayed = 0  # the number of bytes of the file that are in _contents
        self._member: bytes | None = None
        member = identity()
        self._change(
            "open", None, lambda _: ([Change(ChangeKind.JOIN, member)], None), joining=True
        )
        self._member = member

    # Keys.

    def set(self, key: str, value: str | bytes) -> None:
        change = Change(ChangeKind.SET, encode_key(key), encode_value(value))
        self._change("set", key, lambda _: ([change], None))

    def add(self, key: str, amount: int) -> int:
        raw = encode_key(key)

        def decide(contents: LogState) -> tuple[list[Change], int]:
            before = contents.values.get(key)
            number = 0 if before is None else number_in(before)
            if number is None:
                raise self._error("add", key, "the value is not a 64-bit decimal number")
            total = wrapped(number + amount)
            return [Change(ChangeKind.SET, raw, b"%d" % total)], total

        return self._change("add", key, decide)

    def append(self, key: str, value: str | bytes) -> None:
        raw, more = encode_key(key), encode_value(value)

        def decide(contents: LogState) -> tuple[list[Change], None]:
            return [Change(ChangeKind.SET, raw, contents.values.get(key, b"") + more)], None

        self._change("append", key, decide)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        raw, old, new = encode_key(key), encode_value(expected), encode_value(desired)

        def decide(contents: LogState) -> tuple[list[Change], bytes]:
            before = contents.values.get(key)
            if before is None and old:
                return [], old
            if before is None or before == old:
                return [Change(ChangeKind.SET, raw, new)], new
            return [], before

        return self._change("compare_set", key, decide)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        def found(contents: LogState) -> list[bytes] | None:
            if not all(map(contents.has, keys)):
                return None
            return [contents.values.get(key, b"") for key in keys]

        return self._await("get", keys, found, None)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise InvalidArgumentError(
                f"multi_set needs as many values as keys, not {len(values)} for {len(keys)}"
            )
        pairs = zip(keys, values, strict=True)
        changes = [Change(ChangeKind.SET, encode_key(k), encode_value(v)) for k, v in pairs]
        self._change("multi_set", _first(keys), lambda _: (changes, None))

    def check(self, keys: Sequence[str]) -> bool:
        return self._read("check", _first(keys), lambda c: all(map(c.has, keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await("wait", keys, lambda c: all(map(c.has, keys)) or None, timeout)

    def delete_key(self, key: str) -> bool:
        raw = encode_key(key)

        def decide(contents: LogState) -> tuple[list[Change], bool]:
            there = key in contents.values
            return ([Change(ChangeKind.DELETE, raw)] if there else []), there

        return self._change("delete_key", key, decide)

    def num_keys(self) -> int:
        return self._read("num_keys", None, lambda contents: len(contents.values))

    def list_keys(self) -> list[str]:
        return self._read("list_keys", None, lambda contents: list(contents.values))

    # Queues and barriers.

    def queue_push(self, key: str, value: str | bytes) -> None:
        change = Change(ChangeKind.PUSH, encode_key(key), encode_value(value))
        self._change("queue_push", key, lambda _: ([change], None))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        raw = encode_key(key)

        def decide(contents: LogState) -> tuple[list[Change], bytes | None]:
            queue = contents.queues.get(key)
            return ([Change(ChangeKind.POP, raw)], queue[0]) if queue else ([], None)

        deadline = time.monotonic() + seconds_of(self._timeout)
        while (value := self._change("queue_pop", key, decide)) is None:
            if not block:
                raise empty_queue(key, self.path)
            if time.monotonic() >= deadline:
                raise self._timed_out("queue_pop", [key], self._timeout)
            time.sleep(_POLL_S)
        return value

    def queue_len(self, key: str) -> int:
        return self._read("queue_len", key, lambda c: len(c.queues.get(key, ())))

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        self.add(key, 1)
        self._await("barrier", [key], lambda c: int(c.values[key]) >= world_size or None, timeout)

    # The handle.

    def clone(self) -> FileStore:
        """See Store. A clone does not count as a member."""
        other = FileStore.__new__(FileStore)
        Store.__init__(other, self._timeout)
        other.path, other._run_id, other._world_size = self.path, self._run_id, self._world_size
        other._reset_stale = False
        other._lock, other._is_open = threading.RLock(), False
        other._contents, other._replayed, other._member = LogState(), 0, None
        return other

    def close(self) -> None:
        """Leave; the last of `world_size` members removes the file."""
        member, self._member = self._member, None
        if member is None:
            return

        def decide(contents: LogState) -> tuple[list[Change], None]:
            gone = contents.left | {member}
            gone |= {m for m in contents.joined if liveness_of(m) is Liveness.DEAD}
            if 0 < self._world_size <= len(gone):
                Path(self.path).unlink()
            return [Change(ChangeKind.LEAVE, member)], None

        try:
            self._change("close", None, decide)
        except StoreConnectionError:
            return  # the file was removed: there is nothing to leave

    # The file.

    def _change(
        self,
        operation: str,
        key: str | None,
        decide: Callable[[LogState], tuple[list[Change], T]],
        *,
        joining: bool = False,
    ) -> T:
        """Write what `decide` wants, given the contents, and return its answer."""
        with self._lock, self._open(operation, key, fcntl.LOCK_EX, create=joining) as fd:
            if joining:
                self._admit(fd)
            self._replay(fd, operation, key)
            changes, result = decide(self._contents)
            if changes:
                os.ftruncate(fd, self._replayed)  # the torn record of a killed writer is cut off
                _write_all(fd, encode_record(changes), self._replayed)
                self._replay(fd, operation, key)
            return result

    def _read(self, operation: str, key: str | None, look: Callable[[LogState], T]) -> T:
        with self._lock, self._open(operation, key, fcntl.LOCK_SH, create=False) as fd:
            self._replay(fd, operation, key)
            return look(self._contents)

    def _await(
        self,
        operation: str,
        keys: Sequence[str],
        look: Callable[[LogState], T | None],
        timeout: timedelta | None,
    ) -> T:
        limit = timeout or self._timeout
        deadline = time.monotonic() + seconds_of(limit)
        while (result := self._read(operation, _first(keys), look)) is None:
            if time.monotonic() >= deadline:
                raise self._timed_out(operation, keys, limit)
            time.sleep(_POLL_S)
        return result

    @contextmanager
    def _open(self, operation: str, key: str | None, lock: int, *, create: bool) -> Iterator[int]:
        if self._is_open:  # by this thread, which has the lock
            raise self._error(
                operation, key, "a signal handler has interrupted another call of this store; use "
                "another handle in the handler, or set a flag there and make the call later"
            )  # fmt: skip
        self._is_open = True
        try:
            with self._opened(operation, key, lock, create=create) as fd:
                yield fd
        finally:
            self._is_open = False

    @contextmanager
    def _opened(self, operation: str, key: str | None, lock: int, *, create: bool) -> Iterator[int]:
        deadline = time.monotonic() + seconds_of(self._timeout)
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        while True:
            try:
                fd = open_regular(self.path, flags)
            except OSError as error:
                raise StoreConnectionError(
                    f"{operation} at the store {self.path} failed: {error.strerror}; check the "
                    "path, and whether another process removed the file",
                    endpoint=self.path,
                    operation=operation,
                    key=key,
                ) from error
            try:
                self._take_lock(fd, lock, deadline, operation, key)
                if create and os.fstat(fd).st_nlink == 0:
                    continue  # removed by the last member out while we waited: start a new one
                yield fd
                return
            finally:
                os.close(fd)

    def _take_lock(
        self, fd: int, lock: int, deadline: float, operation: str, key: str | None
    ) -> None:
        pause_s = 0.0005
        while True:
            try:
                fcntl.flock(fd, lock | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise self._error(
                        operation, key, "another process holds its lock and makes no progress"
                    ) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S)
            else:
                return

    def _admit(self, fd: int) -> None:
        """Make sure that the file is this run's, and fresh if it is new."""
        header = decode_header(_read_from(fd, 0))
        if header is None:
            if os.fstat(fd).st_size > 0 and not _is_torn_header(fd):
                raise self._error("open", None, "it is not a store; choose another path")
            self._start_afresh(fd)
        elif header[0] != self._run_id:
            if not self._reset_stale:
                raise self._error(
                    "open", None, f"run {header[0]!r} left it and this is run {self._run_id!r}; "
                    "remove it, or pass reset_stale=True"
                )  # fmt: skip
            self._start_afresh(fd)
        else:
            self._replay(fd, "open", None)
            self._refuse_leftover(fd)

    def _refuse_leftover(self, fd: int) -> None:
        joined = self._contents.joined
        present = [m for m in joined if m not in self._contents.left]
        if not self._run_id and present and all(liveness_of(m) is Liveness.DEAD for m in present):
            # No id distinguishes runs, but all members died without leaving.
            warnings.warn(
                f"the store {self.path} was left by a run that crashed; clearing it",
                RuntimeWarning,
                stacklevel=5,
            )
            self._start_afresh(fd)
        elif 0 < self._world_size <= len(joined):
            raise self._error(
                "open", None, f"{len(joined)} processes have already joined it and the world has "
                f"{self._world_size}; remove it, or give each run its own path or run_id"
            )  # fmt: skip

    def _start_afresh(self, fd: int) -> None:
        os.ftruncate(fd, 0)
        _write_all(fd, encode_header(self._run_id), 0)
        self._contents, self._replayed = LogState(), 0

    def _replay(self, fd: int, operation: str, key: str | None) -> None:
        if self._replayed == 0:
            header = decode_header(_read_from(fd, 0))
            if header is None or header[0] != self._run_id:
                raise self._error(operation, key, "another run has taken over the file")
            self._replayed = header[1]
        start = self._replayed
        for changes, end in decode_records(_read_from(fd, start)):
            for change in changes:
                self._contents.apply(change)
            self._replayed = start + end

    def _error(self, operation: str, key: str | None, text: str) -> StoreError:
        name = "" if key is None else f" of {key!r}"
        return StoreError(
            f"{operation}{name} at the store {self.path} was refused: {text}",
            endpoint=self.path,
            operation=operation,
            key=key,
        )

    def _timed_out(
        self, operation: str, keys: Sequence[str], limit: timedelta
    ) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"{operation} of {', '.join(map(repr, keys[:8]))} at the store {self.path} timed out "
            f"after {limit.total_seconds():g} s; check the process that should have set it",
            endpoint=self.path,
            operation=operation,
            key=_first(keys),
        )


def _first(keys: Sequence[str]) -> str | None:
    return keys[0] if keys else None


def _read_from(fd: int, start: int) -> bytes:
    size = os.fstat(fd).st_size
    parts: list[bytes] = []
    while start < size and (part := os.pread(fd, size - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _write_all(fd: int, data: bytes, start: int) -> None:
    while data:
        written = os.pwrite(fd, data, start)
        data, start = data[written:], start + written


def _is_torn_header(fd: int) -> bool:
    data = _read_from(fd, 0)
    return data.startswith(MAGIC) or MAGIC.startswith(data)
