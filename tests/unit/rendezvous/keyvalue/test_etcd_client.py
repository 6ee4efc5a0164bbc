"""Answers with another HTTP status than 200, of an etcd gateway or a proxy before it; TLS files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rallypoint.base.errors import InvalidArgumentError, StoreError
from rallypoint.rendezvous.keyvalue import etcd_client
from rallypoint.rendezvous.keyvalue.etcd_client import EtcdClient, read_tls
from rallypoint.rendezvous.keyvalue.keeper import Transact

PATIENT_S = 60.0
GOOD = b'{"header": {"revision": "7"}, "kvs": []}'


@pytest.fixture
def gateway() -> Iterator[ThreadingHTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    answers: list[tuple[int, bytes]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answers = answers  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_proxys_error_is_tried_again(gateway: ThreadingHTTPServer) -> None:
    gateway.answers += [(502, b"{}"), (503, b'{"message": "later"}'), (200, GOOD)]  # type: ignore[attr-defined]
    place = ("127.0.0.1", gateway.server_port)
    client = EtcdClient([place], try_timeout_s=PATIENT_S, timeout_s=10 * PATIENT_S)
    assert client.read("x/")
    client.close()


class Clock:
    """The time, which passes only while somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, for_s: float) -> None:
        self.now += for_s


def test_errors_all_the_time_are_told(
    gateway: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_client, "time", Clock())
    gateway.answers.append((502, b'{"header": {}}'))  # type: ignore[attr-defined]
    place = ("127.0.0.1", gateway.server_port)
    client = EtcdClient([place], try_timeout_s=PATIENT_S, timeout_s=0.1)
    with pytest.raises(StoreError, match="HTTP status 502"):
        client.read("x/")
    client.close()


def client_of(gateway: ThreadingHTTPServer, *answers: tuple[int, bytes]) -> closing[EtcdClient]:
    """Of a gateway that gives these answers, the last of them again and again."""
    gateway.answers[:] = answers  # type: ignore[attr-defined]
    place = ("127.0.0.1", gateway.server_port)
    return closing(EtcdClient([place], try_timeout_s=PATIENT_S, timeout_s=10 * PATIENT_S))


FOUND = b"""{"header": {"revision": "9"}, "responses": [{"response_range": {"kvs": [
    {"key": "eC9h", "value": "bWluZQ==", "mod_revision": "8"}]}}]}"""  # x/a: mine


@pytest.mark.parametrize(
    ("before", "value", "expected"),
    [
        ([], b"mine", None),  # somebody else wrote the same
        ([(503, b"{}")], b"mine", 8),  # the try that seemed to fail was carried out
        ([(200, b"[]")], b"other", None),
    ],
)
def test_a_write_may_have_been_carried_out_before(
    gateway: ThreadingHTTPServer, before: list[tuple[int, bytes]], value: bytes, expected: int
) -> None:
    with client_of(gateway, *before, (200, FOUND)) as client:
        found = client.transact(Transact(revisions={"x/a": 3}, puts={"x/a": value}))
    assert found == expected


def test_what_etcd_refuses_is_told(gateway: ThreadingHTTPServer) -> None:
    refusal = b'{"code": 7, "message": "permission denied"}'
    with client_of(gateway, (403, refusal)) as client, pytest.raises(StoreError) as raised:
        client.read("x/")
    endpoint = f"127.0.0.1:{gateway.server_port}"
    assert str(raised.value) == f"etcd at {endpoint} refused read: permission denied"
    assert (raised.value.endpoint, raised.value.key) == (endpoint, "x/")


def test_a_lease_that_has_ended(gateway: ThreadingHTTPServer) -> None:
    missing = b'{"code": 5, "message": "requested lease not found"}'
    refused = "refused keep_alive: requested lease not found"
    with client_of(gateway, (404, missing)) as client, pytest.raises(StoreError, match=refused):
        client.keep_alive("7")
    with client_of(gateway, (200, b'{"result": {"TTL": "5"}}'), (200, b'{"result": {}}')) as client:
        assert [client.keep_alive("7"), client.keep_alive("7")] == [True, False]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"protocol": "ftp"}, "it must be http or https"),
        ({"cacert": "/no/file"}, "set protocol=https as well"),
        ({"protocol": "https", "cacert": "/no/file"}, "No such file"),
        ({"protocol": "https", "key": "k"}, "key needs cert"),
    ],
)
def test_wrong_configuration(given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        read_tls(given)
