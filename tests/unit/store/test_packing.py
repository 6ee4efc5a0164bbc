"""Requests that cannot be sent, and what says so; bytes as the protocol's description has them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError, StoreError
from rallypoint.store import wire
from rallypoint.store.hash import HashStore
from rallypoint.store.packing import pack_count, pack_key, pack_keys, pack_number, pack_value
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.server import StoreServer
from rallypoint.store.token import read_token


def blob(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def test_requests_as_bytes() -> None:
    assert pack_key("a") == blob(b"/a")
    assert pack_keys(["a", "\u00e9"]) == struct.pack("<Q", 2) + blob(b"/a") + blob(b"/\xc3\xa9")
    assert pack_value("a", "\u00e9") == blob(b"\xc3\xa9")
    assert pack_value("a", b"\xff") == blob(b"\xff")
    assert pack_number("add", -2) == b"\xfe" + b"\xff" * 7


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda: pack_key(7), "a store's keys are str, not int: 7"),
        (lambda: pack_key("k" * wire.MAX_KEY), f"has at most {wire.MAX_KEY - 1} bytes, not"),
        (lambda: pack_keys("abc"), "expected a list of keys, not the single key 'abc'"),
        (lambda: pack_count(range(wire.MAX_COUNT + 1)), f"at most {wire.MAX_COUNT} keys, not"),
        (lambda: pack_value("a", 7), "values are str or bytes, not int"),  # type: ignore[arg-type]
        (lambda: pack_number("add", 1 << 63), "add takes a 64-bit integer, not 9223372036854775"),
        (lambda: pack_number("add", "x"), "integer, not 'x'"),  # type: ignore[arg-type]
        (lambda: HashStore().multi_set(["a", "b"], ["1"]), "as many values as keys, not 1 for 2"),
        (lambda: StoreServer(token=b""), "the store's token is empty; pass None for no token"),
    ],
)
def test_what_cannot_be_sent(pack: Callable[[], object], message: str) -> None:
    with pytest.raises((InvalidArgumentError, InvalidTypeError)) as raised:
        pack()
    assert message in str(raised.value)


def test_a_value_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_VALUE", 3)
    with pytest.raises(InvalidArgumentError, match="the value of 'a' has 4 bytes, but a store acc"):
        pack_value("a", b"four")


def test_a_prefix_passes_on_what_is_not_about_keys() -> None:
    inner = HashStore()
    outer = PrefixStore("p", inner)
    outer.set_timeout(timedelta(seconds=7))
    assert inner.timeout == outer.timeout == timedelta(seconds=7)
    outer.set("k", "v")
    assert inner.get("p/k") == b"v"
    outer.close()


def test_a_token_file_that_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(" \n")
    with pytest.raises(InvalidArgumentError, match=f"the token file {path} is empty; write a long"):
        read_token(str(path))
    path.write_text(" open sesame\n")
    assert read_token(str(path)) == b"open sesame"


def test_a_number_that_is_none() -> None:
    store = HashStore()
    store.set("k", "seven")
    with pytest.raises(StoreError, match="k"):
        store.add("k", 1)
    assert store.get("k") == b"seven"
