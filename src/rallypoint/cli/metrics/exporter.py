"""Follows all of this user's jobs on this machine, and serves or writes their metrics.

Agents are never asked for a scrape: they tell their jobs' numbers once a second, and a scrape
renders the latest ones (diagnosis/metrics.py). One exporter serves all jobs: a datagram socket with
a name made of the user and the address, which the kernel removes, says that one is there.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import threading
import time
import zlib
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import rallypoint
from rallypoint.base.address import endpoint_of, numeric_family
from rallypoint.base.errors import HostError
from rallypoint.base.wording import printable
from rallypoint.cli.jobs import RunningJob, running_jobs
from rallypoint.diagnosis.metrics import ExportedJob, Metrics, metrics_of, render
from rallypoint.launch.inspection.entries import RUN_DIRECTORY
from rallypoint.launch.inspection.job_follower import START_S, JobFollower

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
_EVERY_S = 1.0
_IDLE = 2  # times that no job was there; another may be about to start
_AGAIN_S = 10.0  # until a job is followed again that could not be
_WRITE_EVERY_S = 15.0
_MOST_CONNECTIONS = 16
_TIMEOUT_S = 10.0  # of a connection, whatever it does


class _ExportedJob:
    """A job that is followed: its nodes on this machine and, on that of node rank 0, all nodes."""

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self._here = JobFollower(job.agents, only_here=True)
        self._all: JobFollower | None = None

    @property
    def is_over(self) -> bool:
        return self._here.is_over

    def close(self) -> None:
        for follower in filter(None, (self._here, self._all)):
            follower.close()

    def poll(self) -> ExportedJob:
        """What is known now; errors are those of JobFollower."""
        self._here.poll()
        here = self._here.history()
        latest = [node.updates[-1] for node in here.nodes if node.updates]
        is_first = any(each.node_rank == 0 for each in latest)
        is_whole = all(each.nodes <= len(latest) for each in latest)
        if self._all is not None and (is_whole or not is_first or self._all.is_over):
            self._all.close()
            self._all = None
        if self._all is None and is_first and not is_whole:
            self._all = JobFollower(self._job.agents)
        if self._all is not None:
            self._all.poll()
        job = self._all.history() if self._all is not None else here
        return ExportedJob(
            run_id=self._job.run_id,
            pid=self._job.agents[0].pid,
            here=here,
            job=job if is_first else None,
            read_at=time.time(),
        )


class Exporter:
    """The metrics of this user's jobs here. Only `text` may be called by several threads."""

    def __init__(self) -> None:
        self.has_jobs = False
        self._jobs: dict[tuple[str, str], _ExportedJob] = {}
        self._not_before: dict[tuple[str, str], float] = {}
        self._metrics: Metrics = {}
        self._scrape_s = 0.0

    def poll(self) -> None:
        """Find new jobs, and take what was told."""
        now = time.monotonic()
        jobs = {each.agents[0].job: each for each in running_jobs()}
        self.has_jobs = bool(jobs)
        known = []
        for key in [*self._jobs, *(key for key in jobs if key not in self._jobs)]:
            if now < self._not_before.get(key, 0.0):
                continue
            try:
                if key not in self._jobs:
                    self._jobs[key] = _ExportedJob(jobs[key])
                known.append(self._jobs[key].poll())
                is_over = self._jobs[key].is_over
            except HostError as error:
                is_over = True
                if key in jobs:  # it has not just ended
                    self._not_before[key] = now + _AGAIN_S
                    print(printable(f"rallypoint metrics: {jobs[key]}: {error}"), file=sys.stderr)
            if is_over and key in self._jobs:
                self._jobs.pop(key).close()
        self._metrics = metrics_of(known, rallypoint.__version__)

    def text(self, *, openmetrics: bool) -> str:
        """The metrics, as they were told last."""
        began = time.perf_counter()
        scrape: Metrics = {"exporter_scrape_seconds": {(): self._scrape_s}}
        text = render({**self._metrics, **scrape}, openmetrics=openmetrics)
        self._scrape_s = time.perf_counter() - began
        return text


def prefers_openmetrics(accept: str) -> bool:
    """Whether a client would rather have OpenMetrics 1.0.0 than Prometheus' text format."""
    openmetrics, text = 0.0, 0.0
    for each in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        given = {name.strip(): value.strip() for name, _, value in
                 (parameter.partition("=") for parameter in parameters)}  # fmt: skip
        try:
            quality = float(given.get("q", "1"))
        except ValueError:
            continue
        if kind == "application/openmetrics-text" and given.get("version", "1.0.0") == "1.0.0":
            openmetrics = max(openmetrics, quality)
        elif kind in ("text/plain", "text/*"):
            text = max(text, quality)
    return openmetrics > 0 and openmetrics >= text


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server_version, sys_version = "rallypoint", ""
    server: MetricsServer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if self.path.partition("?")[0] != "/metrics":
            status, kind, text = 404, "text/plain; charset=utf-8", "The metrics are at /metrics.\n"
        else:
            openmetrics = prefers_openmetrics(",".join(self.headers.get_all("Accept", ())))
            status, kind = 200, OPENMETRICS if openmetrics else TEXT
            text = self.server.exporter.text(openmetrics=openmetrics)
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class MetricsServer(ThreadingHTTPServer):
    """Serves an exporter's metrics, to at most _MOST_CONNECTIONS at a time; others wait."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, exporter: Exporter) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.exporter = listener, exporter
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        self._open: dict[socket.socket, float] = {}

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Serve a connection, once there are few enough."""
        while not self._free.acquire(timeout=_EVERY_S):
            self.service_actions()
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """A connection is done."""
        if self._open.pop(request, None) is not None:
            self._free.release()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that take too long, however many bytes they send."""
        late = time.monotonic() - _TIMEOUT_S
        for request in [each for each, began in tuple(self._open.items()) if began < late]:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error."""


def open_listener(host: str, port: int) -> tuple[socket.socket, ...]:
    """A socket that listens there, and one that says so to this user's other exporters; nothing if
    such an exporter listens there already.

    Raises:
        HostError: nothing can listen there.
    """
    place = f"{os.geteuid()} {host} {port} {os.environ.get(RUN_DIRECTORY, '')}"
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if port:
            mark.bind(f"\0rallypoint metrics {zlib.crc32(os.fsencode(place))}")
    except OSError:
        mark.close()
        return ()
    listener = socket.socket(numeric_family(host) or socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_MOST_CONNECTIONS)
    except OSError as error:
        listener.close()
        mark.close()
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "another program listens there; choose another port"
        raise HostError(f"cannot serve metrics at {endpoint_of(host, port)}: {reason}.") from None
    return listener, mark


def serve(listener: socket.socket, *, beside: int | None = None) -> None:
    """Serve metrics until a signal or, beside a launcher, until it and all jobs here have ended.

    Args:
        beside: can be read when the launcher has ended.
    """
    exporter = Exporter()
    server = MetricsServer(listener, exporter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    launcher, idle = [beside] if beside is not None else [], 0
    while beside is None or launcher or idle < _IDLE:
        exporter.poll()
        idle = 0 if exporter.has_jobs else idle + 1
        if select.select(launcher, [], [], _EVERY_S)[0]:
            launcher, idle = [], 0


def write(path: Path) -> None:
    """Write the metrics into a file every 15 s, as a whole each time; removes it at the end.

    Raises:
        HostError: the file cannot be written.
    """
    exporter, new = Exporter(), path.with_name(f".{path.name}.new")
    write_at = time.monotonic() + START_S
    try:
        new.touch()  # where that fails, it is refused at once
        while True:
            exporter.poll()
            if time.monotonic() >= write_at:
                write_at += _WRITE_EVERY_S
                new.write_text(exporter.text(openmetrics=False), encoding="utf-8")
                new.rename(path)
            time.sleep(_EVERY_S)
    except OSError as error:
        raise HostError(f"cannot write {path}: {error.strerror}.") from None
    finally:
        new.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
