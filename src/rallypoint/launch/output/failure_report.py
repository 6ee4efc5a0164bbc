"""The report of a failed round: from failures, worded by worker_group.py, to lines.

Pure text; worker_group.py decides which rank failed first, the coordinator what comes next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from signal import SIGKILL, SIGTERM

from rallypoint.base.control_message import WorkerError
from rallypoint.base.wording import name_ranks
from rallypoint.launch.worker_group import WorkerExit, WorkerGroup, signal_name

_MAX_LISTED = 16
_MOST_OF_STDERR = 400  # characters
# Of C++ exceptions, assertions and libraries that abort; stacks may follow such a line.
_REASON = re.compile(r"what\(\):|[Aa]ssert|[Ee]rror|ERROR|[Cc]heck failed|F\d{4} |[Ff]atal|FATAL")
_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")


def read_error_file(text: str, *, time_s: float) -> WorkerError | None:
    """What a @record decorator wrote to TORCHELASTIC_ERROR_FILE; None if it is something else.

    `time_s` is when the worker ended: the file's own time has only whole seconds.
    """
    import json

    try:
        message = json.loads(text)["message"]
        if isinstance(message, str):
            return WorkerError("an error", message, "", time_s)
        kind, _, rest = str(message["message"]).partition(": ")
        extra = message.get("extraInfo", {})
        trace = str(extra.get("py_callstack", ""))
        is_secondary, is_startup = (
            extra.get(name) is True for name in ("is_secondary", "is_startup")
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return WorkerError(kind, rest, trace, time_s, is_secondary, is_startup)


def summary(
    group: WorkerGroup,
    *,
    title: str,
    because: str = "",
    host: str = "",
    oom_kills: int | None = None,
    elsewhere: str = "",
    logs: str = "",
    calls: Sequence[str] = (),
    aborted: Sequence[str] = (),
) -> str:
    """The block that ends a failed round: root cause, then other failures, then stopped ranks.

    Args:
        title: their outcome, e.g. "job failed".
        because: what comes next, and why.
        oom_kills: the number of out-of-memory kills meanwhile; None: not known.
        elsewhere: the root cause, if another node knows more about it.
        logs: where the workers' output is kept; empty: reported elsewhere.
        calls: lines on the workers' calls when the first of them failed.
        aborted: lines on why the first of them aborted, from `reason_of_abort`.
    """
    failures = group.failures()
    lines: list[str] = []
    if elsewhere:
        lines.append(f"{title}: {elsewhere}")
    folds = _fold(failures)
    if folds and not elsewhere:
        alike = folds.pop(0)
        lines.append(f"{title}: {alike[0].text}{_count(alike)}{ended_before(group)}")
        lines += _details(alike[0], alike, host, oom_kills)
        lines += [f"  {line}" for line in aborted]
    if folds:
        root = None if elsewhere else failures[0]
        lines.append(f"  also failed: {_listing(folds, root)}")
    if lines:
        if group.stopped:
            lines.append(f"  stopped by the launcher: {name_ranks(sorted(group.stopped))}")
        if calls and not (failures and _tells_calls(failures[0])):
            lines += ["  operations at that time:", *(f"  {line}" for line in calls)]
        if because:
            lines.append(f"  {because}")
        if logs:
            lines.append(f"  logs: {logs}")
    return "\n".join(lines)


def ended_before(group: WorkerGroup) -> str:
    """The ranks that had ended with code 0 when another one lost a peer; empty if none had.

    It reports only that it lost a peer, and no other rank failed, so they are the reason.
    """
    first = next(iter(group.failures()), None)
    if first is None or not first.is_secondary:
        return ""
    ended = [
        each.rank for each in group.exits.values() if each.succeeded and each.time_s <= first.time_s
    ]
    return f"; {name_ranks(sorted(ended))} had ended before, with code 0" if ended else ""


def reason_of_abort(stderr: str, *, uses_gloo: bool) -> list[str]:
    """Lines on why a worker aborted, which reports no exception.

    Args:
        stderr: the end of what it wrote; empty if that is not known.
        uses_gloo: it had a process group of PyTorch's gloo, which aborts if ranks call different
            operations.
    """
    written = [line.strip() for line in stderr.splitlines()]
    telling = [line for line in written if _REASON.search(line)] or list(filter(None, written))
    lines = ["its last lines on stderr, above, may say why"]
    if telling:
        lines = [f"its stderr ends with: {telling[-1][:_MOST_OF_STDERR]}"]
    if uses_gloo:
        lines.append(
            "gloo aborts if ranks call different operations; with rallypoint run --as-gloo, the"
            " error names each rank's call and its line"
        )
    return lines


def _fold(failures: Sequence[WorkerExit]) -> list[list[WorkerExit]]:
    """Equal failures, each listed once, in order of the first of each kind."""
    folds: list[list[WorkerExit]] = []
    known: dict[tuple[str, str], list[WorkerExit]] = {}
    for failure in failures:
        forms = _forms(failure)
        fold = next((known[form] for form in forms if form in known), None)
        if fold is None:
            folds.append(fold := [])
            known.update(dict.fromkeys(forms, fold))
        fold.append(failure)
    return folds


def _forms(failure: WorkerExit) -> list[tuple[str, str]]:
    """Texts of a failure; equal failures share one of them.

    They may differ in memory addresses, and in the rank where each names itself; where all name the
    same ranks, they do not.
    """
    if failure.error is None:
        return [("", failure.what)]
    text = _ADDRESS.sub("0x", failure.error.traceback or failure.error.message)
    own = re.compile(rf"\b{failure.rank}\b")
    # Indented lines are the program's own: numbers in them are not ranks.
    lines = [line if line[:1] == " " else own.sub("N", line) for line in text.split("\n")]
    return [(failure.error.type, text), (failure.error.type, "\n".join(lines))]


def _count(alike: Sequence[WorkerExit]) -> str:
    if len(alike) == 1:
        return ""
    return f" (x{len(alike)} {name_ranks(sorted(each.rank for each in alike))})"


def _listing(folds: Sequence[Sequence[WorkerExit]], root: WorkerExit | None) -> str:
    items = [_without_repeating(alike[0], root) + _count(alike) for alike in folds]
    shown = "; ".join(items[:_MAX_LISTED])
    hidden = len(items) - _MAX_LISTED
    return f"{shown}; and {hidden} more" if hidden > 0 else shown


def _without_repeating(failure: WorkerExit, root: WorkerExit | None) -> str:
    """Omit a message that differs only in its place, as when all ranks report different calls."""
    if failure.error is None or root is None or root.error is None:
        return failure.text
    is_same = (failure.error.type, failure.error.message) == (root.error.type, root.error.message)
    return f"rank {failure.rank} with the same" if is_same else failure.text


def _details(
    failure: WorkerExit, alike: Sequence[WorkerExit], host: str, oom_kills: int | None
) -> list[str]:
    when = datetime.fromtimestamp(failure.noticed_s).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    what = "" if failure.start_error is not None else f" {_ending(failure)},"
    pid = f", pid {failure.pid}" if failure.pid else ""
    where = f"(local rank {failure.local_rank}{pid}, host {host})"
    lines = [f"  rank {failure.rank} {where}{what} at {when}"]
    if failure.signal == SIGKILL and not (failure.killed_because or failure.was_ended):
        lines.append(f"  {_who_killed(oom_kills)}")
    trace = _traceback(failure)
    if trace:
        lines += [f"  traceback of rank {failure.rank}{_count(alike)}:"]
        lines += ["    " + line for line in trace]
    return lines


def _ending(failure: WorkerExit) -> str:
    number = failure.signal
    if number is not None and failure.was_ended and number in (SIGTERM, SIGKILL):
        return f"was then ended by the launcher ({signal_name(number)})"
    return failure.ending


def _tells_calls(failure: WorkerExit) -> bool:
    """Whether its message names the call of each rank."""
    return failure.error is not None and failure.error.type.endswith("MismatchError")


def _traceback(failure: WorkerExit) -> list[str]:
    """Its lines, without the last one if that says what the title has said."""
    error = failure.error
    if error is None:
        return []
    lines = error.traceback.rstrip().splitlines()
    if lines and failure.what == f"raised {lines[-1]}":
        lines.pop()
    return lines


def _who_killed(oom_kills: int | None) -> str:
    if oom_kills is None:
        return (
            "the launcher did not send this signal; often the kernel's out-of-memory killer does "
            "(see dmesg)"
        )
    if oom_kills == 0:
        return (
            "a process other than the launcher sent this signal: the kernel counted no "
            "out-of-memory kill in this control group"
        )
    times = "once" if oom_kills == 1 else f"{oom_kills} times"
    return (
        f"the kernel's out-of-memory killer killed processes of this control group {times} "
        "meanwhile: give the job more memory, or start fewer workers"
    )
