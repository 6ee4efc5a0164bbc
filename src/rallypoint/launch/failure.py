"""What went wrong, told once: from failures to the lines that the user reads.

Pure text; who failed first is decide.py's verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rallypoint.base.control_message import WorkerError
from rallypoint.launch.decide import Failure, JobState

_MAX_LISTED = 16


def signal_name(number: int) -> str:
    """``"SIGKILL"`` for 9; numbers without a name of their own as ``"signal 35"``."""
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_error_file(text: str, *, time_s: float) -> WorkerError | None:
    """What torch's @record decorator wrote to TORCHELASTIC_ERROR_FILE; None if that is not it.

    `time_s` is when the worker ended: the file's own time has only whole seconds.
    """
    import json

    try:
        message = json.loads(text)["message"]
        if isinstance(message, str):
            return WorkerError("an error", message, "", time_s)
        kind, _, rest = str(message["message"]).partition(": ")
        trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return WorkerError(kind, rest, trace, time_s)


def summary(state: JobState, *, host: str, local_ranks: dict[int, int]) -> str:
    """The block that ends a failed job: root cause first, then who else, then who was stopped."""
    failures = state.failures()
    lines: list[str] = []
    if failures:
        root, *others = failures
        lines.append(f"job failed: {_cause(root)}")
        lines += _details(root, host, local_ranks[root.exit.rank])
        if others:
            lines.append(f"  also failed: {_listing([_cause(other) for other in others])}")
        ranks = sorted(state.stopped)
        if ranks:
            lines.append(f"  stopped by the launcher: {name_ranks(ranks)}")
    if state.guardian_was_lost:
        lines.append(
            "job failed: the launcher's guardian process was killed, and all workers died with it;"
            " look for the out-of-memory killer in the kernel's log (dmesg)"
        )
    if state.unkillable:
        pids = ", ".join(map(str, state.unkillable))
        lines.append(
            f"cannot kill process {pids}: stuck in the kernel or not ours to kill; left behind"
        )
    return "\n".join(lines)


def name_ranks(ranks: Sequence[int]) -> str:
    """``"rank 3"``, ``"ranks 0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _listing(items: list[str]) -> str:
    shown = "; ".join(items[:_MAX_LISTED])
    hidden = len(items) - _MAX_LISTED
    return f"{shown}; and {hidden} more" if hidden > 0 else shown


def _cause(failure: Failure) -> str:
    who = f"rank {failure.exit.rank}"
    if failure.exit.start_error is not None:
        return f"{who} could not be started: {failure.exit.start_error}"
    if failure.error is not None:
        message = failure.error.message.strip().partition("\n")[0]
        return f"{who} raised {failure.error.type}{': ' if message else ''}{message:.200}"
    return f"{who} {_ending(failure)}"


def _ending(failure: Failure) -> str:
    end = failure.exit
    if end.signal is None:
        return f"exited with code {end.code}"
    dumped = " (core dumped)" if end.core_dumped else ""
    return f"was killed by {signal_name(end.signal)}{dumped}"


def _details(failure: Failure, host: str, local_rank: int) -> list[str]:
    end = failure.exit
    when = datetime.fromtimestamp(failure.time_s).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    what = "" if end.start_error is not None else f" {_ending(failure)},"
    pid = f", pid {end.pid}" if end.pid else ""
    lines = [f"  rank {end.rank} (local rank {local_rank}{pid}, host {host}){what} at {when}"]
    if end.signal == 9:
        lines.append(
            "  the launcher did not send this signal; often it is the kernel's out-of-memory killer"
            " (see dmesg)"
        )
    if failure.error is not None and failure.error.traceback:
        trace = failure.error.traceback.rstrip().splitlines()
        lines += ["  traceback of rank " + str(end.rank) + ":", *("    " + line for line in trace)]
    return lines
