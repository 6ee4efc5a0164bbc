"""`rallypoint metrics`: serves what is known of running jobs to Prometheus, or writes it to a file.

exporter.py does it; diagnosis/metrics.py says what the metrics are; dashboard.json shows them in
Grafana. `rallypoint run --metrics` starts the same beside its launcher.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from rallypoint.base.address import endpoint_of, is_loopback, numeric_family
from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.cli.beside_launcher import ProgramBeside
from rallypoint.cli.options import HELP, Flag, Options, UsageError, perform, refuse_words, text
from rallypoint.rendezvous.job.round import Endpoint

PROGRAM = "rallypoint metrics"
_DEFAULT = "127.0.0.1:9431"
_USAGE = f"""\
usage: {PROGRAM} [FLAGS]

Serve metrics of all your jobs on this machine at http://{_DEFAULT}/metrics, for Prometheus and
whatever reads OpenMetrics, until Ctrl-C. Each machine of a job serves its own ranks; that of node
rank 0 serves the job's as well. `rallypoint run --metrics {_DEFAULT}` does the same for as long
as jobs run.
"""
_STRANGERS = (
    "everyone who reaches {} can read your jobs' names, ranks, groups, progress, CPU and memory use"
)


class _MetricsOptions(Options):
    listen = Flag(f"where to serve them (default {_DEFAULT})", "HOST:PORT", text, _DEFAULT)
    textfile = Flag(
        "instead, write them into rallypoint-UID.prom in DIR every 15 s, for the\n"
        "textfile collector of node_exporter",
        "DIR",
        text,
        "",
    )
    metrics_public = Flag.switch("allow an address that other machines reach")
    dashboard = Flag.switch("print a dashboard for Grafana, and exit")
    help = HELP


def metrics(words: Sequence[str]) -> int:
    """Run `rallypoint metrics WORDS`; returns the exit status."""
    statuses = ((InvalidArgumentError, 2), (HostError, 1))
    return perform(PROGRAM, words, _MetricsOptions, _export, usage=_USAGE, statuses=statuses)


def start_beside_launcher(address: str, *, is_public: bool) -> str:
    """Start an exporter that serves at that address until this process and all of this user's jobs
    have ended; returns what to tell the user.

    Raises:
        UsageError: it is not a valid address, or one that others reach.
        HostError: nothing can listen there.
    """
    sockets, notes = _open(address, "--metrics", is_public=is_public)
    if not sockets:
        return f"your exporter at {address} serves the metrics of this job, too"
    numbers = [each.fileno() for each in sockets]
    ProgramBeside(__name__, list(map(str, numbers)), keeps=numbers)
    for each in sockets:
        each.close()
    return "; ".join(notes)


def _open(
    address: str, flag: str, *, is_public: bool
) -> tuple[tuple[socket.socket, ...], list[str]]:
    from rallypoint.cli.metrics.exporter import open_listener

    endpoint = Endpoint.parse(address, None, name=flag)
    is_private = is_loopback(endpoint.host) and (
        endpoint.host == "localhost" or numeric_family(endpoint.host) is not None
    )
    if not (is_public or is_private):
        strangers = _STRANGERS.format(endpoint)
        raise UsageError(f"with {flag} {endpoint}, {strangers}; if they may, add --metrics-public.")
    sockets = open_listener(endpoint.host, endpoint.port)
    if not sockets:
        return (), []
    served = endpoint_of(endpoint.host, sockets[0].getsockname()[1])
    notes = [f"metrics are at http://{served}/metrics"]
    if not is_private:
        notes.append(_STRANGERS.format(served))
    return sockets, notes


def _export(options: _MetricsOptions, rest: list[str]) -> int:
    refuse_words(rest)
    if options.dashboard:
        print(files(__name__).joinpath("dashboard.json").read_text(encoding="utf-8"), end="")
        return 0
    from rallypoint.cli.metrics.exporter import serve, write

    if options.textfile and ("--listen" in options or options.metrics_public):
        raise UsageError("with --textfile nothing is served; leave out the other flags.")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if options.textfile:
            write(Path(options.textfile) / f"rallypoint-{os.geteuid()}.prom")
        else:
            sockets, notes = _open(options.listen, "--listen", is_public=options.metrics_public)
            if not sockets:
                raise HostError(f"your exporter at {options.listen} serves all your jobs already.")
            print(*(f"{PROGRAM}: {note}" for note in notes), sep="\n", file=sys.stderr)
            serve(sockets[0])
    except KeyboardInterrupt:
        return 0
    return 0
