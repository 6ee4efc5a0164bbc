"""The store's wire: opcodes, status bytes, limits, and how arguments become bytes, without any I/O.

The stock opcodes 0-18 are those of ``torch.distributed.TCPStore`` (torch 2.13): no framing, no
version, integers in little-endian order. Ours start at 64 and are only sent by a client whose PING
carried PROBE and was answered with PROBE_ANSWER, which a stock server never does: it echoes. From
then on every reply of that connection begins with a Status byte. Every length is checked before
its bytes are read (native/store/wire.cc), and the `pack` functions refuse what the server would
close the connection for. tests/store_twin/messages.py lists the fields of each request.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.store.store import encode_key, encode_value

MAGIC = 0x3C85F7CE
PROBE = 0xF5A10001  # larger than any process id (2**22), which is what stock clients send
PROBE_ANSWER = 0xF5A1AC01
TOKEN_REFUSED = 0xF5DE0001  # a server with a token sends it, as u32, before it closes

MAX_KEY = 8192
MAX_VALUE = 8 << 20
MAX_COUNT = 131_072
MAX_APPENDED = 1 << 30

STOP_WAITING = 0
WAIT_CANCELED = 1
READY = 0
NOT_READY = 1


class Opcode(IntEnum):
    """What a request asks for."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    NUM_KEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18
    # Ours. A connection must have probed before it may use them.
    WAIT_GET = 64  # keys[] -> count x blob, once all are there
    QUEUE_TAKE = 65  # key -> blob, once there is one; no other client can take it in between
    SET_EPHEMERAL = 66  # key, value -> -; the key vanishes with this connection
    WATCH = 67  # key prefix -> an EVENT for each key there is, u8 0, then an EVENT per change
    ENTER = 68  # namespace, i64 round -> i64 round; from now on only that round's keys


class Status(IntEnum):
    """First byte of each reply on a connection that has probed."""

    REPLY = 0  # the stock reply follows
    ERROR = 1  # u8 ErrorCode, blob text
    EVENT = 2  # u8 EventKind, blob key, blob value
    CANCELED = 3  # answers CANCEL_WAIT; nothing follows


class ErrorCode(IntEnum):
    """Why a request was refused while its connection stays open."""

    NOT_A_NUMBER = 1
    FENCED = 2


class EventKind(IntEnum):
    """What happened to a watched key."""

    SET = 0
    DELETED = 1
    FENCED = 2  # the round is over; the value says why


_U64 = struct.Struct("<Q")

# Encode a number: of one byte, unsigned of 32 bits, signed of 64 bits.
u8 = struct.Struct("<B").pack
u32 = struct.Struct("<I").pack
i64 = struct.Struct("<q").pack


def blob(data: bytes) -> bytes:
    """Encode bytes with their length before them."""
    return _U64.pack(len(data)) + data


# What callers pass, checked.


@lru_cache(maxsize=512)
def pack_key(key: str) -> bytes:
    """Pack a key, with the slash that stock clients put before it."""
    try:
        raw = ("/" + key).encode()
    except TypeError:
        raw = b"/" + encode_key(key)  # encode_key reports what is wrong
    if len(raw) > MAX_KEY:
        raise InvalidArgumentError(
            f"a store's key has at most {MAX_KEY - 1} bytes, not {len(raw) - 1}: {key[:40]!r}..."
        )
    return blob(raw)


def pack_keys(keys: Sequence[str]) -> bytes:
    """Pack a list of keys."""
    if isinstance(keys, str):
        raise InvalidArgumentError(f"expected a list of keys, not the single key {keys!r}")
    return pack_count(keys) + b"".join(map(pack_key, keys))


def pack_count(items: Sequence[object]) -> bytes:
    """Pack how many items follow."""
    if len(items) > MAX_COUNT:
        raise InvalidArgumentError(
            f"one request can hold at most {MAX_COUNT} keys, not {len(items)}; split it"
        )
    return _U64.pack(len(items))


def pack_value(key: str, value: str | bytes) -> bytes:
    """Pack the value of `key`."""
    raw = encode_value(value)
    if len(raw) > MAX_VALUE:
        raise InvalidArgumentError(
            f"the value of {key!r} has {len(raw)} bytes, but a store accepts at most "
            f"{MAX_VALUE}; split it"
        )
    return blob(raw)


def pack_number(operation: str, number: int) -> bytes:
    """Pack a 64-bit integer."""
    try:
        return i64(number)
    except struct.error:
        raise InvalidArgumentError(f"{operation} takes a 64-bit integer, not {number!r}") from None
