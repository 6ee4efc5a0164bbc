"""`rallypoint page`: a job as it runs, in a browser: what `rallypoint top` shows.

content.py has what is shown, page.html how, and page_server.py who gets it. `rallypoint run --page`
starts the same beside its launcher.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rallypoint.base.errors import HostError
from rallypoint.base.wording import printable
from rallypoint.cli.beside_launcher import answer_launcher
from rallypoint.cli.jobs import RunningJob, perform_on_job, running_jobs
from rallypoint.cli.options import HELP, Flag, Options, UsageError, integer, reader, text
from rallypoint.cli.page.content import PageData, saved_document
from rallypoint.cli.page.page_server import PageServer
from rallypoint.cli.watching import Inspections, inspect, view_of_ended, view_once
from rallypoint.diagnosis.job_view import view_of
from rallypoint.launch.inspection.ended_job import latest_ended
from rallypoint.launch.inspection.job_follower import follow

PROGRAM = "rallypoint page"
_USAGE = f"""\
usage: {PROGRAM} [JOB] [FLAGS]

Watch a running job in a browser: what `rallypoint top` shows, and what has happened since. It
prints the page's URL, and with ssh the command that forwards it to your own computer. The URL
holds a token: whoever has it can read the page. Nothing is changed in the job. The command ends
with the job, or by Ctrl-C. If no such job is running, it shows how the last one of that name has
ended, and what happened in it.
"""
_FAREWELL_S = 3.0  # so that open pages learn that the job has ended
_PORT = 8432  # suggested for the user's own computer
_SEEK_S = 0.2  # how often a job that is about to start is looked for
# Where these are set, the user is on another machine.
_ELSEWHERE = ("SSH_CONNECTION", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


def _loopback(given: str) -> tuple[str, int]:
    host, _, port = given.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    if not ipaddress.ip_address(host).is_loopback:
        raise ValueError(given)
    return host, integer(port, most=65535)


_read_listen = reader(_loopback, "{name} is {text!r}; it must be 127.0.0.1:PORT or [::1]:PORT.")


class _PageOptions(Options):
    listen = Flag(
        "where to listen, on this machine only (default 127.0.0.1:0; port 0:\na free one)",
        "HOST:PORT",
        _read_listen,
        ("127.0.0.1", 0),
    )
    socket = Flag("listen on a Unix socket instead, which only you can open", "PATH", text, "")
    page_host = Flag(
        "another host name by which browsers reach it, as through a proxy",
        "NAME",
        text,
        "",
        repeats=True,
    )
    save = Flag("write what is to be seen now into one HTML file, and exit", "FILE", text, "")
    help = HELP


def page(words: Sequence[str]) -> int:
    """Run `rallypoint page WORDS`; returns the exit status."""
    return perform_on_job(PROGRAM, words, _USAGE, _PageOptions, _show, _show_ended)


def _show(job: RunningJob, options: _PageOptions) -> int:
    _check(options)
    try:
        if options.save:
            data = PageData(job, time.time())
            data.add(view_once(job), time.time())
            return _save(data, options.save)
        return _serve(job, options)
    except KeyboardInterrupt:
        return 0


def _show_ended(word: str, options: _PageOptions) -> int | None:
    """Show the last job of that name as it ended; None if there is none."""
    _check(options)
    found = latest_ended(word)
    if found is None:
        return None
    job, samples = found
    data = PageData(job, job.ended - job.uptime_s)
    data.add(view_of_ended(job), job.ended)
    data.add_samples(samples)
    data.end(job.ended)
    if options.save:
        return _save(data, options.save)
    try:
        with _server(options) as server:
            _begin(data, server)
            print(printable(f"job {job.name} has ended; Ctrl-C ends this command"), flush=True)
            signal.pause()
    except KeyboardInterrupt:
        return 0
    return 0


def _check(options: _PageOptions) -> None:
    places = [name for name in ("--listen", "--socket") if name in options.texts]
    if len(places) > 1 or (places and options.save):
        others = " and ".join([*places, *(["--save"] if options.save else [])])
        raise UsageError(f"{others} exclude each other; leave one out.")


def _save(data: PageData, file: str) -> int:
    path, text = Path(file), saved_document(data.to_json())
    try:
        if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise HostError(f"{file} cannot be written: {error.strerror}.") from None
    print(f"saved in {file}, with the names of hosts, ranks and files that it shows")
    return 0


def _replace(path: Path, text: str) -> None:
    """Write all of a file, or leave what was there before."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _serve(job: RunningJob, options: _PageOptions) -> int:
    with _server(options) as server:
        data = PageData(job, time.time())
        _begin(data, server)
        _publish(job, data, server)
    return 0


def _server(options: _PageOptions) -> PageServer:
    _end_by_signals()
    names = [name for name in options.page_host.split(",") if name]
    return PageServer(options.socket or options.listen, names)


def _begin(data: PageData, server: PageServer) -> None:
    server.publish(json.dumps(data.to_json()).encode())
    print(printable(invitation(server.address, server.token, os.environ)), flush=True)


def serve_beside_launcher(pid: int, where: str) -> None:
    """Serve the page of the job that this launcher is about to start, and tell it how to open it.

    Args:
        where: HOST:PORT, or the path of a Unix socket, which has a slash.

    Raises:
        UsageError: it is neither.
        HostError: nothing can listen there.
    """
    _end_by_signals()
    with PageServer(where if "/" in where else _read_listen(where, "--page")) as server:
        answer_launcher(invitation(server.address, server.token, os.environ))
        while not select.select([sys.stdin], [], [], _SEEK_S)[0]:
            for job in running_jobs():
                if pid in [agent.pid for agent in job.agents]:
                    data = PageData(job, time.time())
                    server.publish(json.dumps(data.to_json()).encode())
                    with suppress(HostError):
                        return _publish(job, data, server)


def _end_by_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def _publish(job: RunningJob, data: PageData, server: PageServer) -> None:
    """Serve what is told of a job, until it has ended."""
    inspections, inspection = Inspections(), threading.Thread()

    def explain() -> None:
        with suppress(HostError, OSError):
            inspections.add(inspect(job.agents))

    for history in follow(job.agents):
        view = view_of(history, inspections.latest)
        if view is None:
            continue
        data.add(view, time.time())
        server.publish(json.dumps(data.to_json()).encode())
        if not inspection.is_alive() and inspections.is_due(view, time.monotonic()):
            inspection = threading.Thread(target=explain, daemon=True)
            inspection.start()
    data.end(time.time())
    server.publish(json.dumps(data.to_json()).encode())
    print(printable(f"{job} has ended"), flush=True)
    time.sleep(_FAREWELL_S)


def invitation(address: tuple[str, int] | str, token: str, environ: Mapping[str, str]) -> str:
    """How to open the page: here, and from where the user is."""
    if isinstance(address, str):
        here, port = os.path.abspath(address), _PORT
    else:
        host, port = address
        here = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    is_forwarded = isinstance(address, str) or any(environ.get(name) for name in _ELSEWHERE)
    lines = [] if isinstance(address, str) else [f"http://{here}/#{token}"]
    if is_forwarded:
        user, machine = getpass.getuser(), socket.gethostname()
        lines += ["On your own computer:", f"  ssh -N -L {port}:{here} {user}@{machine}"]
        lines += [f"  and then open http://127.0.0.1:{port}/#{token}"]
    return "\n".join(lines)
