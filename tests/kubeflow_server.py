"""A server that takes a TrainJob's status as Kubeflow Trainer does, with an authority of its own
for certificates.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TARGET = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/try/trainjobs/digits/status"
_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@dataclass
class Request:
    """A request that has come."""

    at_s: float
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def status(self) -> dict[str, Any]:
        status = json.loads(self.body)["trainerStatus"]
        assert isinstance(status, dict)
        return status


@dataclass
class KubeflowServer:
    """Its state, and how it answers.

    Attributes:
        answers: an HTTP status; 0: never; -1: a byte each 0.2 s, without an end.
    """

    directory: Path
    answers: int = 200
    token: str = "first token"
    port: int = 0
    requests: list[Request] = field(default_factory=list)

    @property
    def files(self) -> tuple[str, str]:
        return str(self.directory / "ca.pem"), str(self.directory / "token")

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}{TARGET}"

    @property
    def environ(self) -> dict[str, str]:
        """What Kubeflow sets in a container."""
        values = (self.url, *self.files)
        names = ("URL", "CA_CERT", "TOKEN")
        return {f"KUBEFLOW_TRAINER_SERVER_{n}": v for n, v in zip(names, values, strict=True)}

    def renew_token(self, token: str) -> None:
        self.token = token
        (self.directory / "token").write_text(token)

    def refused(self, request: Request) -> tuple[int, str]:
        """The answer to a request, as Trainer's."""
        if self.answers != 200:
            return self.answers, "as the test wants it"
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return 403, "wrong token"
        if request.target != TARGET:
            return 404, "no such TrainJob"
        is_valid = request.headers.get("content-type") == "application/json"
        return (200, "") if is_valid and is_valid_status(request) else (422, "not valid")


def is_valid_status(request: Request) -> bool:
    """Whether a body is within the limits of KEP-2779."""
    status = request.status
    metrics = status.get("metrics", [])
    texts = [text for each in metrics for text in (each["name"], each["value"])]
    numbers = [status.get("progressPercentage", 0), status.get("estimatedRemainingSeconds", 0)]
    known = {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}
    time.strptime(status["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")
    return (
        len(request.body) <= 64 << 10
        and status.keys() <= known
        and all(isinstance(number, int) and 0 <= number < 2**31 for number in numbers)
        and numbers[0] <= 100
        and len(metrics) <= 256
        and all(each.keys() == {"name", "value"} for each in metrics)
        and all(isinstance(text, str) and 1 <= len(text) <= 64 for text in texts)
        and len({each["name"] for each in metrics}) == len(metrics)
    )


def make_certificates(directory: Path, authority: str = "ca") -> None:
    """A certificate authority, and a certificate of a server; called again, new ones."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    new = ("req", "-x509", *key)
    files = ("-keyout", f"{authority}.key", "-out", f"{authority}.pem")
    _openssl(directory, *new, "-subj", f"/CN={authority}", *files)
    signs = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-addext", _NAMES)
    own = ("-keyout", "server.key", "-out", "server.pem", "-addext", "basicConstraints=CA:FALSE")
    _openssl(directory, *new, "-subj", "/CN=server", *signs, *own)


def _openssl(directory: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], check=True, cwd=directory, capture_output=True, timeout=60)


@contextmanager
def kubeflow_server(directory: Path) -> Iterator[KubeflowServer]:
    """One that runs."""
    directory.mkdir()
    make_certificates(directory)
    state = KubeflowServer(directory)
    state.renew_token(state.token)
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            at_s, length = time.monotonic(), int(self.headers["Content-Length"])
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(at_s, self.path, headers, self.rfile.read(length))
            status, message = state.refused(request)
            state.requests.append(request)
            if status == 0:
                is_over.wait(60)
                return
            body = json.dumps({"kind": "Status", "message": message}).encode()
            self.send_response(status if status > 0 else 200)
            self.send_header("Content-Length", str(len(body) if status > 0 else 10**6))
            self.end_headers()
            while status < 0 and not is_over.wait(0.2):
                self.wfile.write(b" ")
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None: ...

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem", directory / "server.key")
    with Server(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        state.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield state
        is_over.set()
        server.shutdown()
