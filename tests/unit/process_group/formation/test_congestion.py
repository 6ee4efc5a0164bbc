"""The congestion control of connections, seen by the kernel's own account."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.process_group.formation.host_network import VARIABLE, Congestion, control_of


def _usually(sock: socket.socket, name: str) -> None:
    """Let the socket be as on a machine where this is the default."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError:
        pytest.skip(f"this kernel does not have or permit {name}")


@contextlib.contextmanager
def _connected(congestion: Congestion, usual: str) -> Iterator[list[socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as caller:
        for each in (listener, caller):
            _usually(each, usual)
            congestion.prepare(each)
        caller.connect(listener.getsockname())
        answerer, _ = listener.accept()
        with answerer:
            for each in (caller, answerer):
                congestion.settle(each)
            yield [caller, answerer]


@pytest.mark.parametrize("short_us", [10_000_000, 0], ids=["short", "long"])
def test_bbr_is_for_long_paths(short_us: int) -> None:
    with _connected(Congestion({}, short_us=short_us), "bbr") as ends:
        assert [control_of(end) for end in ends] == ["bbr" if short_us == 0 else "reno"] * 2


@pytest.mark.parametrize("short_us", [10_000_000, 0])
def test_others_are_left_alone(short_us: int) -> None:
    usual = "cubic"
    with socket.socket() as sock:
        if control_of(sock).startswith("bbr"):
            usual = "reno"
    with _connected(Congestion({}, short_us=short_us), usual) as ends:
        assert [control_of(end) for end in ends] == [usual] * 2


@pytest.mark.parametrize("usual", ["reno", "bbr"])
@pytest.mark.parametrize("wished", ["reno", "bbr"])
def test_the_user_decides(wished: str, usual: str) -> None:
    with _connected(Congestion({VARIABLE: wished}, short_us=0), usual) as ends:
        assert [control_of(end) for end in ends] == [wished] * 2


def test_one_that_the_kernel_does_not_have() -> None:
    with socket.socket() as sock, pytest.raises(HostError, match=r"nosuch: .*permitted.*reno"):
        Congestion({VARIABLE: "nosuch"}).prepare(sock)


@pytest.mark.parametrize("name", ["a" * 16, "two words", "a/b", "a\0b"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must name a congestion control"):
        Congestion({VARIABLE: name})
