"""The starter of `rallypoint run --hosts`, or --on ray: carries out the decisions of
job_on_hosts.py.

One thread waits for all hosts, signals and timers. It holds one connection to each host; when it
ends, however it ends, everything on all hosts ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from rallypoint.base.process_end import ProcessEnd
from rallypoint.base.ready import call_ready, left_until
from rallypoint.cli.flags import PROGRAM, RunOptions
from rallypoint.cli.remote.host_connection import HostConnection, HostListener, HostStreams
from rallypoint.cli.remote.job_on_hosts import (
    Action,
    Drop,
    JobOnHosts,
    LetGo,
    Say,
    SendSignal,
    StartLauncher,
)
from rallypoint.cli.remote.plan import Plan, read_plan
from rallypoint.cluster.remote_shell import command_on, end, last_lines, start
from rallypoint.launch.agent.loop import fill_standard_descriptors
from rallypoint.launch.agent.signals import Signals
from rallypoint.launch.job import Verbosity
from rallypoint.launch.output.file_work import FileWork
from rallypoint.launch.output.lines import open_outlets
from rallypoint.launch.output.sink import STDERR
from rallypoint.launch.output.terminal import print_line
from rallypoint.launch.rounds.store_host import allow_many_connections

NODE = "rallypoint.cli.remote.remote_node"
_MANY = 100  # each has three descriptors, and most systems limit a process to 1,024
_PATIENCE_S = 30.0  # for a blocked reader of the output, at the end
_PATIENCE_WHEN_STOPPED_S = 1.0
_NOT_FOUND = (126, 127)  # exit statuses of a shell that cannot run the program


def run_on_hosts(options: RunOptions, command: Sequence[str]) -> int:
    """Run `rallypoint run --hosts ...`; returns the exit status."""
    plan = read_plan(options, command, os.environ)
    fill_standard_descriptors()
    if len(plan.hosts) > _MANY:
        allow_many_connections()
    return HostsStarter(plan).run()


class Starter(HostListener):
    """Starts, watches and ends the launchers on all hosts.

    Subclasses provide the connections: their `_connect` opens the links.
    """

    def __init__(self, plan: Plan, job: JobOnHosts) -> None:
        self._plan = plan
        self._job = job
        self._links: dict[int, HostConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._files = FileWork(self._selector)
        self._outlets = open_outlets(self._selector, self._files)

    def run(self) -> int:
        """Run the job to its end; returns the exit status."""
        try:
            with Signals(self._selector, self._signalled, self._plan.job.stop_signals):
                try:
                    self._connect()
                    self._wait()
                finally:
                    self._close()
            is_stopped = self._job.stop_signal is not None
            wait_s = _PATIENCE_WHEN_STOPPED_S if is_stopped else _PATIENCE_S
            for outlet in dict.fromkeys(self._outlets):
                outlet.flush(wait_s)
        finally:
            for outlet in dict.fromkeys(self._outlets):
                outlet.close()
            self._files.close()
            STDERR.flush(_PATIENCE_WHEN_STOPPED_S)
            self._selector.close()
        return self._job.status

    def _connect(self) -> None:
        """Begin to connect."""
        raise NotImplementedError

    def _close(self) -> None:
        """Release all connections."""
        for link in self._links.values():
            link.close()

    def _open_link(self, number: int, connection: HostStreams, directory: str) -> None:
        """Open a link to remote_node.py on a host, which will work in that directory."""
        order = {
            "directory": directory,
            "script": self._plan.script,
            "port_range": self._plan.port_range,
        }
        link = HostConnection(number, connection, order, self._outlets, self._selector, self)
        self._links[number] = link

    def _wait(self) -> None:
        while not self._job.is_over:
            call_ready(self._selector, left_until(self._job.wake_at))
            self._perform(self._job.tick(time.monotonic()))

    # Events.

    def greeted(self, host: int, port: int) -> None:
        self._perform(self._job.greeted(host, port, time.monotonic()))

    def failed(self, host: int, why: str) -> None:
        self._perform(self._job.failed(host, why, time.monotonic()))

    def ended(self, host: int, status: int | None) -> None:
        self._perform(self._job.ended(host, status, time.monotonic()))

    def _signalled(self, number: int) -> None:
        stops = signal.Signals(number).name in self._plan.job.stop_signals
        self._perform(self._job.signalled(number, time.monotonic(), stops=stops))

    # Actions.

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartLauncher(host, endpoints):
                    words = [*self._plan.options.launcher, *self._plan.words(host, endpoints)]
                    self._links[host].start(words, self._plan.environ)
                case SendSignal(hosts, number):
                    for host in hosts:
                        self._links[host].signal(number)
                case LetGo(hosts):
                    for host in hosts:
                        self._links[host].let_go()
                case Drop(hosts):
                    for host in hosts:
                        self._drop(host)
                case Say(text, is_trouble):
                    if is_trouble or self._plan.job.verbosity is not Verbosity.QUIET:
                        print_line(f"{PROGRAM}: {text}")

    def _drop(self, host: int) -> None:
        self._links[host].drop()


class ShellConnection(HostStreams):
    """A connection to a host through a process, such as ssh, that runs remote_node.py there."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._command = command
        pipe = subprocess.PIPE
        self._process = start(name, command, stdin=pipe, stdout=pipe, stderr=pipe)
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        # Plain descriptors from here on: nothing below waits for one of them.
        self.stdin, self.stdout, self.stderr = (os.dup(each.fileno()) for each in streams if each)
        for stream in streams:
            if stream is not None:
                stream.close()
        self._end = ProcessEnd(self._process.pid)
        self.ended = self._end.fileno()

    def end(self) -> None:
        end(self._process, 0.0)

    def close(self) -> None:
        self._end.close()
        end(self._process, time.monotonic() + 1.0)  # it has ended; this reaps it

    def why(self, said: str) -> str:
        status = self._process.returncode
        told = f"status {status}" if status >= 0 else f"signal {-status}"
        ended = f"{os.path.basename(self._command[0])} ended with {told}"
        last = last_lines(said)[-1:]
        if status in _NOT_FOUND:
            ended = f"{sys.executable} must exist on all hosts, with Rallypoint installed"
        elif "No module named" in said:
            ended = f"install Rallypoint there as well, for {sys.executable}"
        return "; ".join([line.strip().rstrip(".") for line in last] + [ended])


class HostsStarter(Starter):
    """The starter for --hosts, which uses ssh."""

    def __init__(self, plan: Plan) -> None:
        job = JobOnHosts(
            [host.address for host in plan.hosts],
            fewest=plan.fewest,
            shutdown_timeout_s=plan.job.shutdown_timeout_s,
            now=time.monotonic(),
        )
        super().__init__(plan, job)

    def _connect(self) -> None:
        for number, host in enumerate(self._plan.hosts):
            command = command_on(host.name, self._plan.rsh, NODE)
            self._open_link(number, ShellConnection(host.name, command), os.getcwd())
