"""Who gets the page and its data, and what a hostile client can do: over real sockets."""

from __future__ import annotations

import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.base.errors import HostError
from rallypoint.cli.page import page_server
from rallypoint.cli.page.page_server import MOST_CONNECTIONS, MOST_HEADERS, PageServer

DATA = b'{"name": "job"}'


@pytest.fixture(scope="module")
def served() -> Iterator[PageServer]:
    with PageServer(("127.0.0.1", 0), ["Proxy.Example"]) as server:
        yield server


@pytest.fixture
def server(served: PageServer) -> PageServer:
    served.publish(DATA)
    return served


def connect(server: PageServer) -> socket.socket:
    family = socket.AF_UNIX if isinstance(server.address, str) else socket.AF_INET
    client = socket.socket(family)
    client.settimeout(20)
    client.connect(server.address)
    return client


def answered(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Its status, headers and body; the status is 0 if the connection was closed instead."""
    answer = b""
    try:
        while part := client.recv(1 << 16):
            answer += part
    except ConnectionResetError:
        pass
    finally:
        client.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]) if first else 0, headers, body


def ask(
    server: PageServer,
    target: str = "/data",
    method: str = "GET",
    *,
    host: str | None = "127.0.0.1:1",
    token: str | None = "",
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """`token`: empty: the right one."""
    lines = [f"{method} {target} HTTP/1.1"]
    lines += [] if host is None else [f"Host: {host}"]
    lines += [] if token is None else [f"Authorization: Bearer {token or server.token}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    client = connect(server)
    client.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    return answered(client)


def test_the_page_needs_no_token_and_the_data_does(server: PageServer) -> None:
    assert len(server.token) >= 22  # 128 bits
    status, headers, body = ask(server, "/", token=None)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert server.token.encode() not in body
    status, headers, body = ask(server)
    assert (status, body) == (200, DATA)
    assert headers["Content-Type"] == "application/json; charset=utf-8"
    for wrong in (None, "x", server.token[:-1], server.token + "x", "\xff"):
        status, _, body = ask(server, token=wrong)
        assert status == 401
        assert DATA not in body
    assert ask(server, f"/data?token={server.token}", token=None)[0] == 401
    assert ask(server, token=None, Cookie=f"token={server.token}")[0] == 401


@pytest.mark.parametrize("target", ["/", "/data"])
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8432", 200),
        ("127.0.0.1", 200),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("[::1]:8432", 200),
        ("proxy.example", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8432", 421),
        ("localhost.", 421),
        ("evil@localhost", 421),
        ("localhost:evil", 421),
        ("127.0.0.1\r\nHost: evil.example", 421),
        ("", 421),
        (None, 421),
    ],
)
def test_hosts(server: PageServer, target: str, host: str | None, status: int) -> None:
    """Names that an attacker can make resolve to this address are none of ours."""
    assert ask(server, target, host=host)[0] == status


@pytest.mark.parametrize(
    ("headers", "page", "data"),
    [
        ({"Origin": "http://127.0.0.1:1"}, 200, 200),
        ({"Origin": "https://127.0.0.1:1"}, 200, 200),
        ({"Origin": "https://proxy.example"}, 200, 200),
        ({"Origin": "http://127.0.0.1:2"}, 403, 403),  # another server here, of another user
        ({"Origin": "http://evil.example"}, 403, 403),
        ({"Origin": "null"}, 403, 403),
        ({"Origin": "file://127.0.0.1:1"}, 403, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200, 200),
        ({"Sec_Fetch_Site": "none"}, 200, 200),
        ({"Sec_Fetch_Site": "same-site"}, 403, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Dest": "document"}, 200, 403),  # a link
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Dest": "iframe"}, 403, 403),
    ],
)
def test_other_origins(server: PageServer, headers: dict[str, str], page: int, data: int) -> None:
    assert ask(server, "/", **headers)[0] == page
    assert ask(server, "/data", **headers)[0] == data


def test_nothing_but_reading(server: PageServer) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "get"):
        status, headers, _ = ask(server, method=method)
        assert status == 405, method
        assert headers["Allow"] == "GET, HEAD"
        assert not any(name.startswith("Access-Control") for name in headers)
    status, headers, body = ask(server, method="HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(DATA)), b"")


@pytest.mark.parametrize(
    "target",
    ["/page.html", "/../content.py", "/data/", "/%2e%2e/", "/etc/passwd", "/metrics"],
)
def test_nothing_else_is_served(server: PageServer, target: str) -> None:
    assert ask(server, target)[0] in (400, 404)


def test_every_answer_has_the_headers(server: PageServer) -> None:
    for found in (
        ask(server, "/"),
        ask(server),
        ask(server, token=None),
        ask(server, host="evil.example"),
        ask(server, method="POST"),
        ask(server, "/nothing"),
        ask(server, x="x" * MOST_HEADERS),
    ):
        status, headers, _ = found
        policy = headers["Content-Security-Policy"]
        assert re.match(r"default-src 'none'; script-src 'sha256-[\w+/]+=*'; style-src", policy)
        assert "unsafe" not in policy
        for part in ("connect-src 'self'", "base-uri 'none'", "form-action 'none'"):
            assert part in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Python" not in headers["Server"], status


def test_data_that_is_known_is_not_sent_again(server: PageServer) -> None:
    tag = ask(server)[1]["ETag"]
    status, headers, body = ask(server, If_None_Match=tag)
    assert (status, headers["ETag"], body) == (304, tag, b"")
    assert ask(server, If_None_Match=tag, token="x")[0] == 401
    server.publish(b"{}")
    status, headers, body = ask(server, If_None_Match=tag)
    assert (status, body) == (200, b"{}")
    assert headers["ETag"] != tag


def test_large_headers(server: PageServer) -> None:
    assert ask(server, x="x" * (MOST_HEADERS - 300))[0] == 200
    assert ask(server, x="x" * MOST_HEADERS)[0] == 431
    assert ask(server, "/" + "x" * (1 << 17))[0] in (431, 0)  # 0: it did not read so far


def test_what_is_not_http(server: PageServer) -> None:
    for request in (b"\0" * 100, b"GET / HTTP/9.9", b"\x16\x03\x01", b"GET /data", b"GET\t/\xff x"):
        client = connect(server)
        client.sendall(request + b"\r\n\r\n")
        status, _, body = answered(client)
        assert status in (0, 400, 405, 421, 505)
        assert DATA not in body
    assert ask(server)[0] == 200


def test_slow_clients_are_dropped_and_many_are_refused(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither silence nor a byte now and then holds a connection for longer than the limit."""
    monkeypatch.setattr(page_server, "LIMIT_S", 1.5)
    clients = [connect(server) for _ in range(MOST_CONNECTIONS)]
    for client in clients:
        client.sendall(b"GET / HTTP/1.1\r\n")
    one_more = connect(server)
    assert answered(one_more)[0] == 0
    for _ in range(4):
        clients[0].sendall(b"x")
        time.sleep(0.3)
    assert [answered(client)[0] for client in clients] == [0] * MOST_CONNECTIONS
    assert ask(server)[0] == 200


def test_who_does_not_take_an_answer_is_dropped(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "LIMIT_S", 0.5)
    server.publish(b"x" * (64 << 20))
    client = connect(server)
    head = f"Host: localhost\r\nAuthorization: Bearer {server.token}\r\n"
    client.sendall(f"GET /data HTTP/1.1\r\n{head}\r\n".encode())
    time.sleep(1.5)
    assert len(answered(client)[2]) < 64 << 20


def test_a_unix_socket_is_its_users_own(tmp_path: Path) -> None:
    path = tmp_path / "page.sock"
    with PageServer(str(path)) as server:
        server.publish(DATA)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ask(server, host="localhost:8432")[2] == DATA
        assert ask(server, host="localhost:8432", token=None)[0] == 401
        with pytest.raises(HostError, match=r"page\.sock: Address already in use; choose another"):
            PageServer(str(path))
        assert ask(server, host="localhost:8432")[2] == DATA
    assert not path.exists()


def test_a_taken_port(server: PageServer) -> None:
    assert not isinstance(server.address, str)
    with pytest.raises(HostError, match=r"at 127\.0\.0\.1:\d+: Address already in use"):
        PageServer(server.address)
