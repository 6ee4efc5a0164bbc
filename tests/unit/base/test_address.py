"""Whether the loopback works is seen without sending anything."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.base.address import is_loopback, loopback_trouble

ASK = "from rallypoint.base.address import loopback_trouble; print(loopback_trouble({!r}))"
UP = "ip link set lo up && ip address flush dev lo && "
DOWN = (
    "the loopback interface is down, and without it processes of this machine cannot reach each "
    "other; run `ip link set lo up` as root\n"
)
LACKS = (
    "no interface has the address {}, and without it processes of this machine cannot reach each "
    "other; run `ip address add {}/{} dev lo` as root\n"
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_it_works_here(host: str) -> None:
    assert loopback_trouble(host) == ""
    assert is_loopback(host)


class Refusing:
    """A socket of a system that refuses one of its calls."""

    def __init__(self, call: str, number: int, descriptor: int) -> None:
        self._refused, self._error = call, OSError(number, os.strerror(number))
        self._descriptor = descriptor

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def fileno(self) -> int:
        return self._descriptor

    def connect(self, _: object) -> None:
        raise self._error

    def make(self, *_: object) -> Refusing:
        if self._refused == "socket":
            raise self._error
        return self


@pytest.mark.parametrize(
    ("call", "number", "told"),
    [
        ("socket", errno.EMFILE, ""),
        ("connect", errno.EPERM, ""),
        ("connect", errno.ENETUNREACH, DOWN.rstrip()),
    ],
)
def test_another_error_is_no_trouble_with_it(
    call: str, number: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path(os.devnull).open("rb") as null:  # which has no network interfaces
        monkeypatch.setattr(socket, "socket", Refusing(call, number, null.fileno()).make)
        assert loopback_trouble("127.0.0.1") == told


@pytest.mark.skipif(shutil.which("ip") is None, reason="it needs ip (apt install iproute2)")
@pytest.mark.parametrize(
    ("before", "host", "told"),
    [
        ("", "127.0.0.1", DOWN),
        ("", "localhost", DOWN),
        ("", "::1", DOWN),
        (UP, "127.0.0.1", LACKS.format("127.0.0.1", "127.0.0.1", 8)),
        (UP, "::1", LACKS.format("::1", "::1", 128)),
        # Where packets to it go elsewhere.
        (
            f"{UP} ip link add d0 type veth peer name d1 && ip address add 10.1.1.1/24 dev d0 &&"
            "ip link set d1 up && ip link set d0 up && ip route add default via 10.1.1.2 && ",
            "127.0.0.1",
            LACKS.format("127.0.0.1", "127.0.0.1", 8),
        ),
        ("ip link set lo up && ", "127.0.0.1", "\n"),
    ],
)
def test_where_it_does_not(before: str, host: str, told: str) -> None:
    """In a network namespace of its own."""
    script = f"{before}exec {sys.executable} -c {ASK.format(host)!r}"
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode and "unshare" in found.stderr:
        pytest.skip("this machine forbids network namespaces")
    assert found.stderr == ""
    assert found.stdout == told
