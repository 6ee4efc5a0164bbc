"""`rallypoint doctor`: whether a job with these flags could start, and what prevents it.

    examiner.py --orders--> examined_node.py on each node --answers--> ClusterFacts
    ClusterFacts --> doctor/checks/ --> printed.py

The orders are the same for all nodes; only the connection differs by which they travel: to a
process that ssh started (--hosts), to a node that came to the endpoint (at_endpoint.py), or to a
thread of this process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.cli.doctor.at_endpoint import examine_at_endpoint
from rallypoint.cli.doctor.doctor_flags import PROGRAM, DoctorOptions, DoctorRequest, read_request
from rallypoint.cli.doctor.examiner import examine
from rallypoint.cli.doctor.printed import as_json, as_text, exit_status, report_of
from rallypoint.cli.options import perform
from rallypoint.launch.output.terminal import is_terminal

_USAGE = f"""\
usage: {PROGRAM} [FLAGS OF rallypoint run] [FLAGS] [SCRIPT]

Find out why a job would not start, or would be slow. Write `doctor` instead of `run`: it examines
the nodes that the job would use, and starts no workers. It checks names, ports, firewalls in both
directions, network interfaces, large messages, slow links, versions, GPUs and CPUs, what the
scheduler says, the token, clocks, limits, disks, paths, the kernel's network, other jobs, and
settings known to be wrong. It prints a line for each finding, with what to do about it: red if a
job would fail, yellow if it might. It changes nothing.

This machine:
  rallypoint doctor --path /data --nproc-per-node 8 train.py

Three machines with one command, over ssh, which also works when the network between them does not:
  rallypoint doctor --hosts node1,node2,node3 --path /data --path /checkpoints

The same command on each of two machines, as with `rallypoint run`; also with srun or in pods, where
these flags are not needed. They meet at the endpoint, and each prints the findings of both:
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
        print(as_json(report))
    else:
        is_colourful = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(as_text(report, is_colourful=is_colourful, is_verbose=options.verbose))
    return exit_status(report)


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
