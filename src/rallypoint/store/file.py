"""A store in a file that all processes see: a log under flock, which each of them replays.

    file     MAGIC, a record with the run's id, then one record for each operation
    record   u32 length, u32 CRC-32 of the body, body
    body     changes that belong together: u8 kind, u32 length, key, u32 length, value

A process killed in the middle of a write leaves a record that is too short or has a wrong checksum.
Readers stop before such a record, and the next writer truncates it. The file is opened for each
operation, as NFS requires, and works on NFS wherever flock does (Linux 2.6.12 and later).
"""

from __future__ import annotations

import copy
import fcntl
import os
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import FileIO
from pathlib import Path

from rallypoint.base.errors import StoreConnectionError
from rallypoint.base.files import kernel_identity, open_regular
from rallypoint.base.process_end import is_running, start_of
from rallypoint.store.local_store import Change, ChangeKind, LocalStore, StoreContents
from rallypoint.store.store import DEFAULT_TIMEOUT, encode_key, seconds_of

MAGIC = b"RLYPTLG1"

_RUN = b"run "  # so that a record is never empty: zeros are not a record
_HEAD = struct.Struct("<II")
_CHANGE = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")
_POLL_S = 0.01


class FileStore(LocalStore):
    """A store in the file `file_name`, which the first process creates.

    A file left by a crashed run is recognised by its run id, or because all its members are dead,
    and is never silently reused.

    Args:
        file_name: a path on a file system that all processes share; its folder exists.
        world_size: how many processes will open it; the last of them to close it removes it. -1
            if that is not known; then it stays.
        timeout: how long each operation may take by default.
        run_id: what distinguishes this run from others that might have used the same name.
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
        self._endpoint, self._at = self.path, f" at the store {self.path}"
        self._world_size = world_size
        self._run_id = run_id
        self._header = MAGIC + _record(_RUN + run_id.encode())
        self._begin()
        member = _identity()
        self._member: bytes | None = member
        with self._opened("open", None, fcntl.LOCK_EX, creates=True) as file:
            self._admit(file, reset_stale=reset_stale)
            self._contents.change(ChangeKind.JOIN, member)
            self._write(file)

    def _begin(self) -> None:
        """Set what each handle has for itself."""
        self._lock = threading.RLock()
        self._is_open = False
        self._forget()

    def _forget(self) -> None:
        self._contents = StoreContents()
        self._replayed = len(self._header)  # the size of the part of the file that is in _contents

    def clone(self) -> FileStore:
        """See Store. A clone does not count as a member."""
        other = copy.copy(self)
        other._begin()
        other._member = None
        return other

    def close(self) -> None:
        """Leave; the last of `world_size` members removes the file."""
        member, self._member = self._member, None
        if member is None:
            return
        # If the file was removed, or is another run's by now, there is nothing to leave.
        with suppress(StoreConnectionError), self._hold("close", None) as contents:
            contents.change(ChangeKind.LEAVE, member)
            gone = [m for m, is_in in contents.members.items() if not is_in or _is_dead(m)]
            if 0 < self._world_size <= len(gone):
                Path(self.path).unlink()

    # The contents.

    @contextmanager
    def _hold(
        self, operation: str, key: str | None, *, writes: bool = True
    ) -> Iterator[StoreContents]:
        if key is not None:
            encode_key(key)
        with self._opened(operation, key, fcntl.LOCK_EX if writes else fcntl.LOCK_SH) as file:
            file.seek(0)
            if file.read(len(self._header)) != self._header:
                text = "another run has taken over the file"
                raise self._refusal(operation, key, text, StoreConnectionError)
            try:
                self._replay(file)
                yield self._contents
                self._write(file)
            except BaseException:
                self._forget()  # the file may not have what was changed, or not all of it
                raise

    def _pause(self, count: int, left_s: float) -> None:
        time.sleep(min(_POLL_S, left_s))

    def _replay(self, file: FileIO) -> None:
        file.seek(self._replayed)
        data, start = file.read(), 0
        while (body := _body(data, start)) is not None:
            for change in _changes(body):
                self._contents.apply(change)
            start += _HEAD.size + len(body)
        self._replayed += start

    def _write(self, file: FileIO) -> None:
        changes = self._contents.changes
        if changes:
            record = encode_record(changes)
            file.seek(self._replayed)
            file.truncate()  # the torn record of a killed writer is cut off
            _write_all(file, record)
            self._replayed += len(record)
            changes.clear()

    # Who may join.

    def _admit(self, file: FileIO, *, reset_stale: bool) -> None:
        """Make sure that the file is this run's, and fresh if it is new."""
        data = file.read()
        if data.startswith(self._header):
            self._replay(file)
            members = self._contents.members
            present = [m for m, is_in in members.items() if is_in]
            if not self._run_id and present and all(map(_is_dead, present)):
                # No id distinguishes runs, but all members died without leaving.
                warnings.warn(
                    f"the store {self.path} was left by a run that crashed; clearing it",
                    RuntimeWarning,
                    stacklevel=3,
                )
            elif 0 < self._world_size <= len(members):
                raise self._refusal(
                    "open", None, f"{len(members)} processes have already joined it and the world "
                    f"has {self._world_size}; remove it, or give each run its own path or run_id"
                )  # fmt: skip
            else:
                return
        elif not data.startswith(MAGIC) and not MAGIC.startswith(data):
            raise self._refusal("open", None, "it is not a store; choose another path")
        else:
            run = _body(data, len(MAGIC))  # None: the header is torn, or not yet written
            if run is not None and not reset_stale:
                name = run[len(_RUN) :].decode(errors="replace")
                raise self._refusal(
                    "open", None, f"run {name!r} left it and this is run {self._run_id!r}; "
                    "remove it, or pass reset_stale=True"
                )  # fmt: skip
        self._forget()
        file.seek(0)
        file.truncate()
        _write_all(file, self._header)

    # The file.

    @contextmanager
    def _opened(
        self, operation: str, key: str | None, lock: int, *, creates: bool = False
    ) -> Iterator[FileIO]:
        with self._lock:
            if self._is_open:  # by this thread, which has the lock
                raise self._refusal(
                    operation, key, "a signal handler has interrupted another call of this store; "
                    "use another handle in the handler, or set a flag there and make the call later"
                )  # fmt: skip
            self._is_open = True
            try:
                deadline = time.monotonic() + seconds_of(self._timeout)
                while True:
                    with self._open(operation, key, creates=creates) as file:
                        self._take_lock(file, lock, deadline, operation, key)
                        # The last member out may have removed it while we waited: then a new one.
                        if not creates or os.fstat(file.fileno()).st_nlink > 0:
                            yield file
                            return
            finally:
                self._is_open = False

    def _open(self, operation: str, key: str | None, *, creates: bool) -> FileIO:
        flags = os.O_RDWR | (os.O_CREAT if creates else 0)
        try:
            return FileIO(open_regular(self.path, flags), "r+")
        except OSError as error:
            raise StoreConnectionError(
                f"{operation} at the store {self.path} failed: {error.strerror}; check the "
                "path, and whether another process removed the file",
                endpoint=self.path,
                operation=operation,
                key=key,
            ) from error

    def _take_lock(
        self, file: FileIO, lock: int, deadline: float, operation: str, key: str | None
    ) -> None:
        pause_s = 0.0005
        while True:
            try:
                fcntl.flock(file, lock | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    text = "another process holds its lock and makes no progress"
                    raise self._refusal(operation, key, text) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S)
            else:
                return


# The log.


def _write_all(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def encode_record(changes: Iterable[Change]) -> bytes:
    """Return the record of changes that happen together or not at all."""
    return _record(
        b"".join(
            _CHANGE.pack(kind, len(key)) + key + _LENGTH.pack(len(value)) + value
            for kind, key, value in changes
        )
    )


def _record(body: bytes) -> bytes:
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _body(data: bytes, start: int) -> bytes | None:
    """Return the body of the record that starts there; None if it is torn."""
    if len(data) < start + _HEAD.size:
        return None
    length, checksum = _HEAD.unpack_from(data, start)
    body = data[start + _HEAD.size : start + _HEAD.size + length]
    if len(body) < length or zlib.crc32(body) != checksum:
        return None
    return body or None  # a crash may leave zeros, which would pass for empty records


def _changes(body: bytes) -> Iterator[Change]:
    position = 0
    while position < len(body):
        kind, size = _CHANGE.unpack_from(body, position)
        position += _CHANGE.size
        key = body[position : position + size]
        position += size
        (size,) = _LENGTH.unpack_from(body, position)
        position += _LENGTH.size
        yield Change(ChangeKind(kind), key, body[position : position + size])
        position += size


# Its members.


def _identity() -> bytes:
    """Identify this process and this opening of a store, so that others can check whether it is
    alive.
    """
    pid = os.getpid()
    return b"\0".join([_machine(), b"%d" % pid, start_of(pid) or b"", os.urandom(8).hex().encode()])


def _is_dead(member: bytes) -> bool:
    """Whether that process has ended; one of another machine is taken to live, a reused pid not."""
    machine, pid, start, _ = member.split(b"\0")
    return machine == _machine() and not is_running(int(pid), start)


def _machine() -> bytes:
    try:
        return kernel_identity("pid").encode()  # the namespace distinguishes containers
    except OSError:  # there is no /proc
        return os.fsencode(os.uname().nodename)
