"""Serves the page of a job to one user's browsers on this machine. It only reads: GET and HEAD.

Other users of the machine, and other pages in the same browser, can connect as well. Hence data
needs the token; `Host` must be a known name, or a page of another name could be made to resolve to
this address; and a request that a browser sends for another page is refused. A connection has one
request, a limited size and limited time, so that nobody can keep others out for long.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Collection
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType

from rallypoint.base.errors import HostError
from rallypoint.cli.page.content import DOCUMENT, policy

MOST_CONNECTIONS = 16
LIMIT_S = 10.0  # for a request to come, and for an answer to be taken
MOST_HEADERS = 8 << 10  # bytes
_OWN_NAMES = ("127.0.0.1", "[::1]", "localhost")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(:\d{1,5})?")
_Request = socket.socket | tuple[bytes, socket.socket]  # as socketserver has it
_HEADERS = {
    "Content-Security-Policy": policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class PageServer(ThreadingMixIn, TCPServer):
    """Serves what was published last, in threads, from when it is entered.

    Attributes:
        token: what a browser must know.
        address: host and port, or the path of a Unix socket.

    Args:
        names: further host names by which browsers reach it, through a proxy.

    Raises:
        HostError: the address is not free.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int] | str, names: Collection[str] = ()) -> None:
        self.token = secrets.token_urlsafe(16)
        self._names = frozenset(name.lower() for name in names)
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._data, self._tag = b"", '""'
        self._path = address if isinstance(address, str) else ""
        self.address_family = (
            socket.AF_UNIX
            if isinstance(address, str)
            else socket.AF_INET6
            if ":" in address[0]
            else socket.AF_INET
        )
        mask = os.umask(0o177)  # a Unix socket is its user's own
        try:
            super().__init__(address, _Conversation)  # type: ignore[arg-type]
        except OSError as error:
            where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
            text = f"the page cannot be served at {where}: {error.strerror}"
            raise HostError(f"{text}; choose another address.") from None
        finally:
            os.umask(mask)
        self.address: tuple[str, int] | str = self._path or self.socket.getsockname()[:2]
        host = "" if isinstance(self.address, str) else self.address[0]
        self._own_names = frozenset((*_OWN_NAMES, host, *self._names))

    def __enter__(self) -> PageServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        self.server_close()
        if self._path:
            os.unlink(self._path)

    def publish(self, data: bytes) -> None:
        """Serve this from now on."""
        self._data, self._tag = data, f'"{hashlib.sha256(data).hexdigest()[:16]}"'

    @property
    def published(self) -> tuple[bytes, str]:
        """The data, and its entity tag; empty if there is none yet."""
        return self._data, self._tag

    def refusal(self, headers: Message, path: str) -> HTTPStatus | None:
        """Why a request is refused; None: it is not."""
        hosts = headers.get_all("Host", [])
        host = hosts[0].lower() if len(hosts) == 1 else ""
        named = _HOST.fullmatch(host)
        if named is None or named[1] not in self._own_names:
            return HTTPStatus.MISDIRECTED_REQUEST
        origin = headers.get("Origin")
        if origin is not None:
            scheme, _, its_host = origin.lower().partition("://")
            its = _HOST.fullmatch(its_host)
            is_known = its_host == host or (its is not None and its[1] in self._names)
            if scheme not in ("http", "https") or not is_known:
                return HTTPStatus.FORBIDDEN
        is_opened = path == "/" and headers.get("Sec-Fetch-Dest") == "document"  # by a link
        if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not is_opened:
            return HTTPStatus.FORBIDDEN
        if path not in ("/", "/data"):
            return HTTPStatus.NOT_FOUND
        given = headers.get("Authorization", "").encode("latin-1", "replace")
        if path == "/data" and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            return HTTPStatus.UNAUTHORIZED
        return None

    # How socketserver calls its parts.

    def process_request(self, request: _Request, client_address: object) -> None:
        """Start a thread, if there are not too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: _Request, client_address: object) -> None:
        """Answer, in that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go, or are too slow, are nothing to tell."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Conversation(BaseHTTPRequestHandler):
    """One request and its answer."""

    server: PageServer
    server_version, sys_version = "rallypoint", ""
    request_version, requestline, command = "HTTP/1.0", "", ""  # until they are read
    default_request_version = "HTTP/1.0"  # of requests without: answers have headers

    def handle(self) -> None:
        head = self._head()
        if len(head) > MOST_HEADERS:
            self._answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif head:
            self.rfile = BytesIO(head)
            self.handle_one_request()

    def _head(self) -> bytes:
        """The request up to its empty line, or a little more than is allowed; empty: it ended."""
        deadline, head = time.monotonic() + LIMIT_S, b""
        while b"\r\n\r\n" not in head and len(head) <= MOST_HEADERS:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = self.connection.recv(MOST_HEADERS + 1 - len(head))
            if not part:
                return b""
            head += part
        self.connection.settimeout(LIMIT_S)
        return head

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        refusal = self.server.refusal(self.headers, path)
        if refusal is not None:
            self._answer(refusal)
        elif path == "/data" and not self.server.published[0]:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE)
        elif path == "/":
            self._answer(HTTPStatus.OK, DOCUMENT.encode(), "text/html")
        else:
            data, tag = self.server.published
            is_known = self.headers.get("If-None-Match") == tag
            status = HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK
            self._answer(status, b"" if is_known else data, "application/json", tag)

    do_HEAD = do_GET  # noqa: N815 - as the base class calls it

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses."""
        is_method = code == HTTPStatus.NOT_IMPLEMENTED
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED if is_method else HTTPStatus(code))

    def _answer(
        self, status: HTTPStatus, body: bytes | None = None, kind: str = "text/plain", tag: str = ""
    ) -> None:
        body = f"{status.phrase}\n".encode() if body is None else body
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the base class
        """Nothing is logged."""
