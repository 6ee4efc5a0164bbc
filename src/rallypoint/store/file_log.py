"""The log that a FileStore keeps: a header that names the run, then one record per change.

    header   MAGIC, then a record with the run's id
    record   u32 length, u32 CRC-32 of the body, body
    body     changes: u8 kind, u32 length, key, u32 length, value

A process killed in the middle of a write leaves a record that is too short or has a wrong checksum.
Readers stop before such a record, and the next writer truncates it. This module is pure: bytes in,
bytes out.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

MAGIC = b"RLYPTLG1"

_RUN = b"run "  # so that a record is never empty: zeros are not a record

_HEAD = struct.Struct("<II")
_CHANGE = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")


class ChangeKind(IntEnum):
    """What a change does."""

    SET = 1
    DELETE = 2
    PUSH = 3
    POP = 4
    JOIN = 5  # key: the member's identity
    LEAVE = 6


@dataclass(frozen=True, slots=True)
class Change:
    """One change to the store."""

    kind: ChangeKind
    key: bytes
    value: bytes = b""


@dataclass(slots=True)
class LogState:
    """What a log amounts to."""

    values: dict[str, bytes] = field(default_factory=dict)
    queues: dict[str, deque[bytes]] = field(default_factory=dict)
    joined: list[bytes] = field(default_factory=list)
    left: set[bytes] = field(default_factory=set)

    def has(self, key: str) -> bool:
        """Tell whether a waiter for `key` has nothing to wait for."""
        return key in self.values or key in self.queues

    def apply(self, change: Change) -> None:
        """Do what `change` says."""
        key = change.key.decode()
        match change.kind:
            case ChangeKind.SET:
                self.values[key] = change.value
            case ChangeKind.DELETE:
                self.values.pop(key, None)
            case ChangeKind.PUSH:
                self.queues.setdefault(key, deque()).append(change.value)
            case ChangeKind.POP:
                self.queues[key].popleft()
                if not self.queues[key]:
                    del self.queues[key]
            case ChangeKind.JOIN:
                self.joined.append(change.key)
            case ChangeKind.LEAVE:
                self.left.add(change.key)


def encode_header(run_id: str) -> bytes:
    """Return the first bytes of a log."""
    return MAGIC + _record(_RUN + run_id.encode())


def encode_record(changes: Iterable[Change]) -> bytes:
    """Return the record of changes that happen together or not at all."""
    return _record(
        b"".join(
            _CHANGE.pack(change.kind, len(change.key))
            + change.key
            + _LENGTH.pack(len(change.value))
            + change.value
            for change in changes
        )
    )


def decode_header(data: bytes) -> tuple[str, int] | None:
    """Return the run's id and where the records start; None if the header is torn or foreign."""
    if not data.startswith(MAGIC):
        return None
    body = _body(data, len(MAGIC))
    if body is None:
        return None
    return body[len(_RUN) :].decode(errors="replace"), len(MAGIC) + _HEAD.size + len(body)


def decode_records(data: bytes) -> Iterator[tuple[list[Change], int]]:
    """Yield the changes of each whole record, and where it ends; stop before a torn one."""
    start = 0
    while (body := _body(data, start)) is not None:
        start += _HEAD.size + len(body)
        yield list(_changes(body)), start


def _record(body: bytes) -> bytes:
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _body(data: bytes, start: int) -> bytes | None:
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
