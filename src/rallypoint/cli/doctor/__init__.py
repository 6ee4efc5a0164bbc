"""`rallypoint doctor`: whether a job with these flags could start, and what prevents it.

    examiner.py --orders--> examined_node.py on each node --answers--> ClusterFacts
    ClusterFacts --> doctor/checks/ --> report, as text or JSON

The orders are the same for all nodes; only the connection differs. It leads to a process that ssh
started (--hosts), to a node that connected to the endpoint (at_endpoint.py), or to a thread of this
process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.json_records import to_json
from rallypoint.base.wording import one_line
from rallypoint.cli.doctor.at_endpoint import examine_at_endpoint
from rallypoint.cli.doctor.doctor_flags import PROGRAM, DoctorOptions, DoctorRequest, read_request
from rallypoint.cli.doctor.examiner import examine
from rallypoint.cli.options import perform
from rallypoint.doctor.check_result import Severity
from rallypoint.doctor.checks import DoctorReport, report_of
from rallypoint.launch.output.terminal import is_terminal

_COLOURS = {Severity.GREEN: "32", Severity.YELLOW: "33", Severity.RED: "31"}
_USAGE = f"""\
usage: {PROGRAM} [FLAGS OF rallypoint run] [FLAGS] [SCRIPT]

Find out why a job would not start, or would be slow. Write `doctor` instead of `run`: it checks
the nodes that the job would use, and starts no workers. It checks names, ports, firewalls in both
directions, network interfaces, large messages, slow links, versions, GPUs and CPUs, the scheduler's
variables, the token, clocks, limits, disks, paths, the kernel's network, other jobs, and settings
known to be wrong. It prints a line for each finding, with its remedy: red if a job would fail,
yellow if it might. It changes nothing.

This machine:
  rallypoint doctor --path /data --nproc-per-node 8 train.py

Three machines with one command, over ssh, even if the network between them does not work:
  rallypoint doctor --hosts node1,node2,node3 --path /data --path /checkpoints

The same command on each of two machines. Each prints the findings of both. With srun, and in pods,
these flags are not needed:
  rallypoint doctor --nnodes 2 --node-rank 0 --master-addr 10.0.0.1

The exit status is 0 if nothing is red, 1 if something is, and 2 if the command line is wrong.
`rallypoint run --help-all` lists the flags that choose the nodes; docs/guides/doctor.md says what
each check does. Further flags:
"""


def doctor(words: Sequence[str]) -> int:
    """Run `rallypoint doctor WORDS`; returns the exit status."""
    return perform(
        PROGRAM,
        words,
        DoctorOptions,
        _doctor,
        usage=_USAGE,
        groups=DoctorOptions.groups[-1:],
        environ=os.environ,
        # HostError: the command that --rsh names does not exist.
        statuses=((InvalidArgumentError, 2), (HostError, 2)),
    )


def _doctor(options: DoctorOptions, command: list[str]) -> int:
    request = read_request(options, command, os.environ)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)  # programs started on other hosts end first
    began = time.monotonic()
    if is_terminal():
        _tell_progress(request)
    if request.meets:
        report = examine_at_endpoint(request, began)
    else:
        report = report_of(examine(request), time.monotonic() - began)
    if options.json:
        print(json.dumps(to_json(report, with_defaults=True)))
    else:
        is_colourful = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(as_text(report, is_colourful=is_colourful, is_verbose=options.verbose))
    return exit_status(report)


def as_text(report: DoctorReport, *, is_colourful: bool, is_verbose: bool) -> str:
    """The lines for people."""
    lines = [_line(each.level, each.text, is_colourful=is_colourful) for each in report.findings]
    if is_verbose:
        lines += [
            _line(each.level, f"{each.number} {each.title}", is_colourful=is_colourful)
            for each in report.checks
            if each.level == Severity.GREEN.word
        ]
    return "\n".join([*lines, _summary(report)])


def exit_status(report: DoctorReport) -> int:
    """The exit status: 1 if something is red."""
    return int(report.level == Severity.RED.word)


def _line(word: str, text: str, *, is_colourful: bool) -> str:
    shown = f"{word:<6}"
    if is_colourful:
        shown = f"\x1b[{_COLOURS[Severity[word.upper()]]}m{shown}\x1b[0m"
    return f"{shown}  {one_line(text)}"


def _summary(report: DoctorReport) -> str:
    count = len(report.nodes)
    nodes = f"{count} node{'s' * (count != 1)}, {len(report.checks)} checks"
    levels = [each.level for each in report.findings]
    told = [
        f"{levels.count(level.word)} {level.word}"
        for level in (Severity.RED, Severity.YELLOW)
        if level.word in levels
    ]
    return f"{nodes}, {report.seconds} s: {', '.join(told) or 'no problems found'}"


def _tell_progress(request: DoctorRequest) -> None:
    """Show progress on a terminal, where a person waits."""
    if request.hosts:
        what = f"examining {len(request.hosts)} hosts"
    elif request.meets:
        what = f"waiting for up to {request.wait_s:g} s for {request.most} nodes"
    else:
        what = "examining this machine"
    print(f"{PROGRAM}: {what} ...", file=sys.stderr)


def _ended(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
