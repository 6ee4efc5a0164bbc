"""Nodes that meet at the endpoint, on this machine: those that come, and those that are refused."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest

from rallypoint.cli.doctor import at_endpoint
from rallypoint.cli.doctor.at_endpoint import examine_at_endpoint
from rallypoint.cli.doctor.doctor_flags import DoctorRequest
from rallypoint.doctor import probe
from rallypoint.doctor.checks import DoctorReport
from rallypoint.doctor.probe import TokenRefusedError, admit, prove

TOKEN = b"ours"
NAME = os.uname().nodename


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that does not get its turn is no silent node."""
    monkeypatch.setattr(at_endpoint, "_STRANGER_S", 60.0)
    for module in (at_endpoint, probe):
        monkeypatch.setattr(module, "CONNECT_S", 60.0)
    monkeypatch.setattr(probe, "TALK_S", 60.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def request(port: int, rank: int = 0, count: int = 2) -> DoctorRequest:
    return DoctorRequest(
        fewest=count,
        most=count,
        node_rank=rank,
        endpoints=(("127.0.0.1", port),),
        meets=True,
        is_static=True,
        token=TOKEN,
        wait_s=60.0,
    )


def texts(report: DoctorReport) -> str:
    return "\n".join(each.text for each in report.findings)


class Caller:
    """A connection to the endpoint from an address of its own."""

    def __init__(self, port: int, address: str) -> None:
        while True:
            try:
                self._socket = socket.create_connection(("127.0.0.1", port), 60, (address, 0))
                return
            except ConnectionRefusedError:  # it does not listen yet
                os.sched_yield()

    def is_admitted(self, token: bytes) -> bool:
        return prove(self._socket, token)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def introduce(self, **told: object) -> None:
        self.send(json.dumps(told).encode() + b"\n")

    def shut(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def rest(self) -> bytes:
        """Until the end; what it left unread resets the connection."""
        data = b""
        with self._socket, contextlib.suppress(ConnectionResetError):
            while part := self._socket.recv(1 << 16):
                data += part
        return data


def test_each_gets_the_report_on_all() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        works = [pool.submit(examine_at_endpoint, request(port, rank), 0.0) for rank in (0, 1)]
        host, guest = [work.result() for work in works]
    assert host.nodes == (NAME, NAME)
    probes: Any = host.facts["probes"]
    assert [(each["source"], each["target"], each["outcome"]) for each in probes] == [
        (0, 1, "REACHED"),
        (1, 0, "REACHED"),
    ]
    assert guest == replace(host, facts={})


def test_those_that_do_not_belong_are_refused_and_told() -> None:
    """Each from an address of its own, as one that tries again counts once."""
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(examine_at_endpoint, request(port, 0, 3), 0.0)
        for data in (b"GET / HTTP/1.1\r\n\r\n" + bytes(64), b""):
            stranger = Caller(port, "127.0.0.9")
            with contextlib.suppress(OSError):  # it may be turned away before it has said all
                stranger.send(data)
                stranger.shut()
            assert stranger.rest() == b""
        rude = Caller(port, "127.0.0.9")
        assert rude.is_admitted(TOKEN)
        rude.introduce(version=version("rallypoint"))
        assert rude.rest() == b""
        for _ in range(2):
            other = Caller(port, "127.0.0.2")
            assert not other.is_admitted(b"theirs")
            told = json.loads(other.rest())
            assert (told["do"], told["absence"]["check"]) == ("refuse", 10)
        old = Caller(port, "127.0.0.3")
        assert old.is_admitted(TOKEN)
        old.introduce(version="0.0.1", name="old", node_rank=2)
        told = json.loads(old.rest())
        assert (told["do"], told["absence"]["check"]) == ("refuse", 7)
        report = work.result()
    assert report.nodes == (NAME,)
    found = texts(report)
    assert (
        found.count("the node at 127.0.0.2 has a different token than this one, or only one") == 1
    )
    ours = version("rallypoint")
    assert f"old has Rallypoint 0.0.1, and {NAME} {ours}; install the same version on" in found
    assert "127.0.0.9" not in found


def test_those_that_do_not_come_are_missed() -> None:
    port = free_port()
    report = examine_at_endpoint(replace(request(port, 0, 3), wait_s=0.01), 0.0)
    assert (
        f"1 of 3 nodes connected to 127.0.0.1:{port} within 0.01 s: {NAME}; missing: node rank "
        "1, 2; start the same command on the other nodes at the same time"
    ) in texts(report)


def test_a_node_that_falls_silent_is_absent() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(examine_at_endpoint, request(port), 0.0)
        guest = Caller(port, "127.0.0.2")
        assert guest.is_admitted(TOKEN)
        guest.introduce(version=version("rallypoint"), name="quiet", node_rank=0)
        guest.shut()
        asked = json.loads(guest.rest().splitlines()[0])
        report = work.result()
    assert asked == {"do": "clock"}
    assert report.nodes == (NAME,)
    assert "it does not answer: the connection ended; check whether that machine" in texts(report)
    assert "its --node-rank is 0, which another node also uses" in texts(report)


def test_a_port_that_is_held_is_found() -> None:
    """The node that should listen there examines itself."""
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        report = examine_at_endpoint(request(port), 0.0)
    nodes: Any = report.facts["nodes"]
    (node,) = nodes
    (found,) = node["ports"]
    assert found["endpoint"] == f"127.0.0.1:{port}"
    assert found["held_by"].startswith(f"process {os.getpid()} (")


def meet(host: Callable[[socket.socket], None]) -> DoctorReport:
    """What a guest reports, if that happens to its connection at the endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        work = pool.submit(examine_at_endpoint, replace(request(port, 1), wait_s=0.0), 0.0)
        connection, _ = server.accept()
        with connection:
            host(connection)
        return work.result()


def admitted(*lines: dict[str, Any]) -> Callable[[socket.socket], None]:
    """A host that admits the guest, reads who it is, and says these lines."""

    def host(connection: socket.socket) -> None:
        admit(connection, TOKEN)
        told = json.loads(connection.makefile("rb").readline())
        assert told == {"version": version("rallypoint"), "name": NAME, "node_rank": 1}
        for line in lines:
            connection.sendall(json.dumps(line).encode() + b"\n")

    return host


def other_token(connection: socket.socket) -> None:
    with pytest.raises(TokenRefusedError):
        admit(connection, b"theirs")


REFUSED = {"name": "", "why": "you are too old", "advice": "be young", "check": 7}
STOPPED = "the endpoint's node exited or lost the connection during the examination; check its out"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (admitted(), STOPPED),
        (admitted({"no": "order"}), STOPPED),
        (admitted({"do": "refuse", "absence": REFUSED}), "you are too old; be young"),
        (other_token, "has a different token than this one; set the same RALLYPOINT_TOKEN"),
    ],
)
def test_a_guest_that_gets_no_report_examines_itself(
    host: Callable[[socket.socket], None], expected: str
) -> None:
    report = meet(host)
    assert expected in texts(report)
    assert report.nodes == (NAME,)


def test_a_guest_finds_another_program_or_nothing_at_the_endpoint() -> None:
    def at_endpoint(report: DoctorReport) -> str:
        probes: Any = report.facts["endpoint_probes"]
        (found,) = probes
        assert found["host"] == "127.0.0.1"
        return str(found["outcome"])

    assert at_endpoint(meet(socket.socket.close)) == "STRANGER"
    absent = replace(request(free_port(), 1), wait_s=0.0)
    assert at_endpoint(examine_at_endpoint(absent, 0.0)) == "REFUSED"
