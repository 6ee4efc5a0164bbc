"""The store's messages as bytes, both ways, without I/O: the reference for native/store/wire.cc.

A request is its opcode and the fields that LAYOUT lists; store/wire.py says what they are. Every
length is checked before its bytes are read.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from enum import Enum

from rallypoint.store.wire import (
    MAX_COUNT,
    MAX_KEY,
    MAX_VALUE,
    Opcode,
    Status,
    blob,
    i64,
    u8,
    u32,
)

MAX_REQUEST = 256 << 20  # the stock server has no limit: one MULTI_SET could take 1 TiB


class Field(Enum):
    """One part of a request's body."""

    KEY = "blob of at most MAX_KEY bytes"
    VALUE = "blob of at most MAX_VALUE bytes"
    NUMBER = "i64"
    NONCE = "u32"
    KEYS = "u64 count, then so many KEY"
    PAIRS = "u64 count, then so many KEY, VALUE"


LAYOUT: dict[Opcode, tuple[Field, ...]] = {
    Opcode.VALIDATE: (Field.NONCE,),
    Opcode.SET: (Field.KEY, Field.VALUE),
    Opcode.COMPARE_SET: (Field.KEY, Field.VALUE, Field.VALUE),
    Opcode.GET: (Field.KEY,),
    Opcode.ADD: (Field.KEY, Field.NUMBER),
    Opcode.CHECK: (Field.KEYS,),
    Opcode.WAIT: (Field.KEYS,),
    Opcode.NUM_KEYS: (),
    Opcode.DELETE_KEY: (Field.KEY,),
    Opcode.APPEND: (Field.KEY, Field.VALUE),
    Opcode.MULTI_GET: (Field.KEYS,),
    Opcode.MULTI_SET: (Field.PAIRS,),
    Opcode.CANCEL_WAIT: (),
    Opcode.PING: (Field.NONCE,),
    Opcode.QUEUE_PUSH: (Field.KEY, Field.VALUE),
    Opcode.QUEUE_POP: (Field.KEY,),
    Opcode.QUEUE_LEN: (Field.KEY,),
    Opcode.LIST_KEYS: (),
    Opcode.BARRIER: (Field.KEY, Field.NUMBER),
    Opcode.WAIT_GET: (Field.KEYS,),
    Opcode.QUEUE_TAKE: (Field.KEY,),
    Opcode.SET_EPHEMERAL: (Field.KEY, Field.VALUE),
    Opcode.WATCH: (Field.KEY,),
    Opcode.ENTER: (Field.KEY, Field.NUMBER),
}

_KNOWN = frozenset(LAYOUT)
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


class WireError(Exception):
    """The peer sent bytes that are no request; the connection cannot go on."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `number` holds a NUMBER or a NONCE; PAIRS fill `keys` and `values` alike."""

    opcode: Opcode
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0

    @property
    def key(self) -> bytes:
        """The first key."""
        return self.keys[0]

    @property
    def value(self) -> bytes:
        """The first value."""
        return self.values[0]


@dataclass(frozen=True, slots=True)
class Reply:
    """One message from the server: a status, which only probed connections see, and a body."""

    status: Status
    body: bytes


def encode_request(request: Request) -> bytes:
    """Return the bytes of `request`."""
    parts = [u8(request.opcode)]
    keys, values = iter(request.keys), iter(request.values)
    for field in LAYOUT[request.opcode]:
        match field:
            case Field.KEY:
                parts.append(blob(next(keys)))
            case Field.VALUE:
                parts.append(blob(next(values)))
            case Field.NUMBER:
                parts.append(i64(request.number))
            case Field.NONCE:
                parts.append(u32(request.number))
            case Field.KEYS:
                parts.append(_U64.pack(len(request.keys)))
                parts.extend(blob(key) for key in keys)
            case Field.PAIRS:
                parts.append(_U64.pack(len(request.keys)))
                parts.extend(blob(k) + blob(v) for k, v in zip(keys, values, strict=True))
    return b"".join(parts)


def encode_reply(reply: Reply, *, tagged: bool) -> bytes:
    """Return the bytes of `reply`, with its status if the connection has probed."""
    return u8(reply.status) + reply.body if tagged else reply.body


class Parser:
    """Turns the bytes of one connection into requests, however they are cut into pieces.

    Each byte is looked at once: `_requests` is a generator, suspended where bytes are missing.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._read = 0  # bytes of the request in progress that have been decoded
        self._progress = self._requests()

    @property
    def buffered(self) -> int:
        """How many bytes wait for the rest of their request."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Request]:
        """Yield the requests that `data` completes.

        Raises:
            WireError: at the first byte that cannot be part of a request.
        """
        self._buffer += data
        while (request := next(self._progress)) is not None:
            yield request

    def _requests(self) -> Iterator[Request | None]:
        while True:
            yield (yield from self._request())
            del self._buffer[: self._read]
            self._read = 0

    def _request(self) -> Generator[None, None, Request]:
        code = (yield from self._bytes(1))[0]
        if code not in _KNOWN:
            raise WireError(f"opcode {code} does not exist")
        keys: list[bytes] = []
        values: list[bytes] = []
        number = 0
        for field in LAYOUT[Opcode(code)]:
            match field:
                case Field.KEY:
                    keys.append((yield from self._blob("key", MAX_KEY)))
                case Field.VALUE:
                    values.append((yield from self._blob("value", MAX_VALUE)))
                case Field.NUMBER:
                    number = yield from self._integer(_I64)
                case Field.NONCE:
                    number = yield from self._integer(_U32)
                case Field.KEYS | Field.PAIRS:
                    for _ in range((yield from self._length("count", MAX_COUNT))):
                        keys.append((yield from self._blob("key", MAX_KEY)))
                        if field is Field.PAIRS:
                            values.append((yield from self._blob("value", MAX_VALUE)))
        return Request(Opcode(code), tuple(keys), tuple(values), number)

    def _bytes(self, size: int) -> Generator[None, None, bytes]:
        end = self._read + size
        if end > MAX_REQUEST:
            raise WireError(f"request exceeds {MAX_REQUEST} bytes")
        while len(self._buffer) < end:
            yield None
        start, self._read = self._read, end
        return bytes(self._buffer[start:end])

    def _integer(self, layout: struct.Struct) -> Generator[None, None, int]:
        number: int = layout.unpack((yield from self._bytes(layout.size)))[0]
        return number

    def _length(self, noun: str, limit: int) -> Generator[None, None, int]:
        length = yield from self._integer(_U64)
        if length > limit:
            raise WireError(f"{noun} of {length} exceeds {limit}")
        return length

    def _blob(self, noun: str, limit: int) -> Generator[None, None, bytes]:
        return (yield from self._bytes((yield from self._length(noun, limit))))
