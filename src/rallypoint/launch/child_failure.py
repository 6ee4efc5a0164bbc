"""Failed workers as torch's programs know them: `ChildFailedError`, `ProcessFailure`, error files.

Names, attributes and the format of error.json are those of torch.distributed.elastic's
multiprocessing.errors; the texts are the launcher's own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rallypoint.base.errors import WorkersFailedError
from rallypoint.launch.worker_group import WorkerExit, signal_name

NOT_AVAILABLE = "<N/A>"
_CANNOT_RUN = 127  # what shells say of a program that could not be started


@dataclass
class ProcessFailure:
    """One failed worker.

    Attributes:
        exitcode: negative for a signal.
        error_file: "<N/A>" if the launcher keeps none.
        error_file_data: its contents, or what they would be.
        message: its "message": torch's dictionary, or a text.
        timestamp: seconds since the epoch.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any]
    message: Any
    timestamp: int

    @property
    def traceback(self) -> str:
        """The traceback of the worker's exception; empty if it is not known."""
        if not isinstance(self.message, dict):
            return ""
        return str(self.message.get("extraInfo", {}).get("py_callstack", ""))

    def signal_name(self) -> str:
        """The signal that killed it, or "<N/A>"."""
        return signal_name(-self.exitcode) if self.exitcode < 0 else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """As in 2026-01-31_12:00:00."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")


class ChildFailedError(WorkersFailedError):
    """Workers of a job failed.

    Attributes:
        name: of the function or program that they ran.
        status: what the launcher would have exited with.
        failures: by global rank, this node's failed workers, the root cause first.
    """

    failures: dict[int, ProcessFailure]  # type: ignore[assignment]  # as torch's
    is_in_error_file = True  # of this process, if it has one: the agent wrote the root cause

    def __init__(self, name: str, failures: dict[int, ProcessFailure], status: int = 1) -> None:
        self.name = name
        self.failures = failures
        super().__init__(self.format_msg(), status=status)
        self.failures = failures

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The root cause: its global rank and failure."""
        return next(iter(self.failures.items()))

    def format_msg(self) -> str:
        """The error's text: a line for each failed worker; the launcher has printed tracebacks."""
        lines = [f"{self.name} failed:"]
        for rank, failure in self.failures.items():
            message = failure.message
            text = message.get("message", "") if isinstance(message, dict) else message
            lines.append(
                f"  rank {rank} (local rank {failure.local_rank}, pid {failure.pid},"
                f" exit code {failure.exitcode}): {text}"
            )
        return "\n".join(lines)


def process_failures(failures: Sequence[WorkerExit]) -> dict[int, ProcessFailure]:
    """By rank, in this order."""
    found = {}
    for end in failures:
        data = error_data(end)
        found[end.rank] = ProcessFailure(
            local_rank=end.local_rank,
            pid=end.pid,
            exitcode=_exit_code(end),
            error_file=end.error_file if os.path.exists(end.error_file) else NOT_AVAILABLE,
            error_file_data=data,
            message=data["message"],
            timestamp=int(end.noticed_s),
        )
    return found


def error_data(end: WorkerExit) -> dict[str, Any]:
    """The contents of an error file, as torch's launcher writes it: what the worker wrote, with its
    exit code; without that, what the launcher knows.
    """
    data = _read(end.recorded)
    if data is None:
        error, text = end.error, end.what
        if error is not None:
            text = f"{error.type}: {error.message}"
        trace = "" if error is None else error.traceback
        extra = {"py_callstack": trace, "timestamp": str(int(end.noticed_s or time.time()))}
        data = {"message": {"message": text, "extraInfo": extra}}
    code = _exit_code(end)
    if isinstance(data["message"], dict) and code:
        data["message"]["errorCode"] = code
    return data


def leave_error(path: str, end: WorkerExit) -> str:
    """Write a root cause where the launcher's caller looks for it; returns why that failed."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(error_data(end), file)
    except OSError as error:
        return f"cannot write TORCHELASTIC_ERROR_FILE={path}: {error.strerror}"
    return ""


def _read(text: str | None) -> dict[str, Any] | None:
    try:
        data = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and "message" in data else None


def _exit_code(end: WorkerExit) -> int:
    if end.start_error is not None:
        return _CANNOT_RUN
    if end.signal is not None:
        return -end.signal
    return end.code or 0
