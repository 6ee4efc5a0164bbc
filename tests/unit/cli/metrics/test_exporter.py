"""How an exporter answers, and that there is one at an address."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from rallypoint.base.errors import HostError
from rallypoint.cli.metrics import exporter as module
from rallypoint.cli.metrics.exporter import (
    OPENMETRICS,
    TEXT,
    Exporter,
    MetricsServer,
    open_listener,
    prefers_openmetrics,
)

# What Prometheus 2.42 and 3 send, and others.
ACCEPTS = {
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1": True,
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3": True,
    "application/openmetrics-text": True,
    "text/plain;version=0.0.4;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5": False,
    "application/openmetrics-text;version=0.0.1": False,
    "application/openmetrics-text;version=1.0.0;q=0": False,
    "application/openmetrics-text;q=x": False,
    "text/html,*/*;q=0.8": False,
    "": False,
}


@pytest.mark.parametrize("accept", ACCEPTS)
def test_the_format_that_a_client_prefers(accept: str) -> None:
    assert prefers_openmetrics(accept) == ACCEPTS[accept]


@pytest.fixture
def port() -> Iterator[int]:
    listener, mark = open_listener("127.0.0.1", 0)
    mark.close()
    server = MetricsServer(listener, Exporter())
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield listener.getsockname()[1]
    server.shutdown()
    thread.join()
    server.server_close()


def answer(port: int, method: str, path: str, **headers: str) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.getheader("Content-Type", ""), body


def test_requests(port: int) -> None:
    status, kind, body = answer(port, "GET", "/metrics", Accept=OPENMETRICS)
    assert (status, kind) == (200, "application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert body.endswith(b"# EOF\n")
    status, kind, body = answer(port, "GET", "/metrics?x=1")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8") == (200, TEXT)
    assert body.startswith(b"# TYPE rallypoint_exporter_scrape_seconds gauge\n")
    assert answer(port, "HEAD", "/metrics") == (200, TEXT, b"")
    assert answer(port, "GET", "/")[0] == answer(port, "GET", "/../etc/passwd")[0] == 404
    assert answer(port, "POST", "/metrics")[0] == answer(port, "PUT", "/metrics")[0] == 501


def test_many_scrapes_at_once(port: int) -> None:
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: answer(port, "GET", "/metrics"), range(100)))
    assert [each[0] for each in answers] == [200] * 100


def test_clients_that_do_not_finish_do_not_keep_others_out(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.2)
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for each in slow:
        with suppress(OSError):
            each.sendall(b"GET /metrics HT")
    assert answer(port, "GET", "/metrics")[0] == 200
    for each in slow:
        each.close()


def test_the_second_exporter_of_a_user_finds_the_first() -> None:
    listener, mark = open_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(HostError, match=rf"127.0.0.1:{port}: another program listens there"):
        open_listener("127.0.0.1", port)  # whose name is not known, as its port was not
    listener.close()
    mark.close()
    listener, mark = open_listener("127.0.0.1", port)
    assert open_listener("127.0.0.1", port) == ()
    listener.close()
    mark.close()
    listener, mark = open_listener("127.0.0.1", port)  # nothing is left of it
    listener.close()
    mark.close()
