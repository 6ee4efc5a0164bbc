"""Packs the caller's arguments into requests, after checking them.

Invalid arguments raise InvalidTypeError or InvalidArgumentError before a byte is sent; the server
would only close the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.store import wire
from rallypoint.store.store import encode_key, encode_value

_blob_head = struct.Struct("<Q").pack
_i64 = struct.Struct("<q").pack


@lru_cache(maxsize=512)
def pack_key(key: str) -> bytes:
    """Pack a key, with the slash that stock clients put before it."""
    try:
        raw = ("/" + key).encode()
    except TypeError:
        raw = b"/" + encode_key(key)  # encode_key reports what is wrong
    if len(raw) > wire.MAX_KEY:
        raise InvalidArgumentError(
            f"a store's key has at most {wire.MAX_KEY - 1} bytes, not {len(raw) - 1}: "
            f"{key[:40]!r}..."
        )
    return _blob_head(len(raw)) + raw


def pack_keys(keys: Sequence[str]) -> bytes:
    """Pack a list of keys."""
    if isinstance(keys, str):
        raise InvalidArgumentError(f"expected a list of keys, not the single key {keys!r}")
    return pack_count(keys) + b"".join(map(pack_key, keys))


def pack_count(items: Sequence[object]) -> bytes:
    """Pack how many items follow."""
    if len(items) > wire.MAX_COUNT:
        raise InvalidArgumentError(
            f"one request can hold at most {wire.MAX_COUNT} keys, not {len(items)}; split it"
        )
    return _blob_head(len(items))


def pack_value(key: str, value: str | bytes) -> bytes:
    """Pack the value of `key`."""
    raw = encode_value(value)
    if len(raw) > wire.MAX_VALUE:
        raise InvalidArgumentError(
            f"the value of {key!r} has {len(raw)} bytes, but a store accepts at most "
            f"{wire.MAX_VALUE}; split it"
        )
    return _blob_head(len(raw)) + raw


def pack_number(operation: str, number: int) -> bytes:
    """Pack a 64-bit integer."""
    try:
        return _i64(number)
    except struct.error:
        raise InvalidArgumentError(f"{operation} takes a 64-bit integer, not {number!r}") from None
