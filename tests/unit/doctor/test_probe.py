"""Probes over the loopback, and the challenge that lets a caller in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from tests.ports import reserved_port

from rallypoint.base.errors import HostError
from rallypoint.base.port_range import VARIABLE
from rallypoint.doctor import probe as probe_module
from rallypoint.doctor.cluster_facts import ConnectOutcome
from rallypoint.doctor.probe import (
    GREETING,
    HEAD,
    RECEIVED,
    ProbeListener,
    Target,
    TokenRefusedError,
    _send,
    _stream,
    admit,
    listen,
    probe_all,
    probe_endpoint,
    prove,
    receive,
    secret_of,
)

SECRET = b"of this examination"
ENDS = {"Connection reset by peer", "Broken pipe"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that does not get its turn is no silent node."""
    for name in ("CONNECT_S", "TALK_S", "STALL_S"):
        monkeypatch.setattr(probe_module, name, 60.0)
    monkeypatch.setattr(probe_module, "_stream", lambda *_: 1000.0)


@pytest.fixture
def listener() -> Iterator[ProbeListener]:
    with closing(ProbeListener(secret_of(SECRET, 1))) as found:
        yield found


def test_a_node_that_is_reached(listener: ProbeListener) -> None:
    target = Target(number=1, address="127.0.0.1", port=listener.port)
    (probe,) = probe_all(0, [target], SECRET)
    assert (probe.source, probe.target, probe.outcome) == (0, 1, ConnectOutcome.REACHED)
    assert (probe.stalls, probe.other_address) == (False, "")
    assert probe.latency_us > 0
    assert probe.mbit_s == 1000.0


def test_a_stream(listener: ProbeListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a caller that does not get its turn nothing may come while the listener counts."""
    monkeypatch.setattr(probe_module, "STALL_S", 0.2)
    place = ("127.0.0.1", listener.port)
    while not _stream(*place, secret_of(SECRET, 1), 0.05):
        pass
    assert _stream(*place, b"another", 0.05) == 0.0


def test_a_stream_tells_its_end() -> None:
    """The listener would otherwise wait for more, and take that for a slow link."""
    caller, called = socket.socketpair()

    def count() -> None:
        total = len(receive(called, HEAD.size)) - HEAD.size
        while data := called.recv(1 << 16):
            total += len(data)
        called.sendall(RECEIVED.pack(total, 7))

    called.settimeout(10)
    with caller, called, ThreadPoolExecutor(1) as pool:
        counting = pool.submit(count)
        caller.sendall(HEAD.pack(0, 0, 10))
        total, microseconds = _send(caller, 0.01)
        counting.result()
    assert (total > 0, microseconds) == (True, 7)


def test_only_the_node_itself_counts(listener: ProbeListener) -> None:
    target = Target(number=1, address="127.0.0.2", port=listener.port, others=("127.0.0.1",))
    (probe,) = probe_all(0, [target], SECRET)
    assert probe.outcome is ConnectOutcome.REACHED  # all of 127.0.0.0/8 is this machine
    mistaken = Target(number=3, address="127.0.0.1", port=listener.port)
    with reserved_port() as port:
        refused = Target(number=2, address="127.0.0.1", port=port)
        probes = probe_all(0, [target, refused, mistaken], SECRET)
    assert [(each.target, each.outcome) for each in probes] == [
        (1, ConnectOutcome.REACHED),
        (2, ConnectOutcome.REFUSED),
        (3, ConnectOutcome.STRANGER),
    ]


def test_another_address_of_a_node_is_tried(listener: ProbeListener) -> None:
    """The first is that of all hosts of a network, to which there are no connections."""
    target = Target(
        number=1, address="255.255.255.255", port=listener.port, others=("127.0.0.1", "::1")
    )
    (probe,) = probe_all(0, [target], SECRET)
    assert (probe.outcome, probe.other_address) == (ConnectOutcome.UNREACHABLE, "127.0.0.1")
    assert probe.latency_us > 0


@pytest.mark.parametrize(
    ("is_admitted", "ends", "outcome", "details"),
    [
        (False, False, ConnectOutcome.DROPPED, {"it was silent after connecting"}),
        (True, True, ConnectOutcome.DROPPED, ENDS),
        (False, True, ConnectOutcome.STRANGER, ENDS),
    ],
)
def test_a_node_that_does_not_go_on(
    is_admitted: bool,
    ends: bool,
    outcome: ConnectOutcome,
    details: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            if is_admitted:
                admit(connection, secret_of(SECRET, 1))
            else:
                receive(connection, len(GREETING) + 32)
            if not ends:
                has_ended.wait()

    if not ends:
        monkeypatch.setattr(probe_module, "TALK_S", 0.2)
    has_ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        work = pool.submit(answer, server)
        target = Target(number=1, address="127.0.0.1", port=server.getsockname()[1])
        (probe,) = probe_all(0, [target], SECRET)
        has_ended.set()
        work.result()
    assert probe.outcome is outcome
    assert probe.detail in details
    assert probe.mbit_s == 0


def test_a_stream_to_nobody_has_no_rate() -> None:
    with reserved_port() as port:
        assert _stream("127.0.0.1", port, SECRET, 0.05) == 0.0


def test_who_does_not_know_the_secret_is_not_measured(listener: ProbeListener) -> None:
    target = Target(number=1, address="127.0.0.1", port=listener.port)
    (probe,) = probe_all(0, [target], b"another")
    assert (probe.outcome, probe.mbit_s) == (ConnectOutcome.STRANGER, 0.0)


def test_the_port_range_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        monkeypatch.setenv(VARIABLE, f"{port}-{port}")
        with pytest.raises(HostError, match=f"only port of the port range {port}-{port} is in use"):
            ProbeListener(SECRET)


def test_endpoints(listener: ProbeListener) -> None:
    with reserved_port() as free:
        assert probe_endpoint(0, "127.0.0.1", free, 60.0).outcome is ConnectOutcome.REFUSED
        listener.listen_too(free)
        assert probe_endpoint(0, "127.0.0.1", free, 60.0).outcome is ConnectOutcome.REACHED
        with pytest.raises(OSError, match="in use"):
            listener.listen_too(free)
    assert probe_endpoint(0, "no-such-host.invalid", free).outcome is ConnectOutcome.UNKNOWN


@pytest.mark.parametrize("theirs", [b"secret", b"other", b""])
def test_the_challenge(theirs: bytes) -> None:
    caller, called = socket.socketpair()
    refused: list[TokenRefusedError] = []

    def be_called() -> None:
        try:
            admit(called, b"secret")
        except TokenRefusedError as error:
            refused.append(error)

    thread = threading.Thread(target=be_called)
    with caller, called:
        thread.start()
        assert prove(caller, theirs) is (theirs == b"secret")
        thread.join()
    assert len(refused) == (theirs != b"secret")


def test_a_stranger_is_no_wrong_token() -> None:
    caller, called = socket.socketpair()
    with caller, called:
        caller.sendall(b"GET / HTTP/1.1\r\n".ljust(len(GREETING) + 32))
        with pytest.raises(ConnectionAbortedError):
            admit(called, b"secret")


def test_listeners_take_both_families() -> None:
    with listen(0) as found:
        port = found.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
