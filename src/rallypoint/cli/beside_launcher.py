"""Programs that `rallypoint run` starts beside its launcher: the exporter of metrics, the page of
the job, and the one that reports to Kubeflow.

The launcher imports nothing of theirs. Their standard input ends with it, however it ends. Ctrl-C,
which ends the job, does not reach them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from rallypoint.base.errors import HostError
from rallypoint.cli.options import UsageError
from rallypoint.launch.job import TOKEN

_READY = "ready\n"
_POLL_S = 0.02


class ProgramBeside:
    """A program that `python -m MODULE WORDS` runs.

    Args:
        keeps: descriptors that it gets, under the same numbers.
        shows_errors: it has this process's standard error.
        answers: wait until it calls `answer_launcher`.

    Attributes:
        answer: what it told.

    Raises:
        HostError, UsageError: what it told, if it is not ready.
    """

    def __init__(
        self,
        module: str,
        words: Sequence[str] = (),
        *,
        keeps: Sequence[int] = (),
        shows_errors: bool = False,
        answers: bool = False,
    ) -> None:
        ends, self._ours = os.pipe()
        read, told = os.pipe()
        for descriptor in keeps:
            os.set_inheritable(descriptor, True)
        nowhere = (os.devnull, os.O_WRONLY, 0)
        is_quiet = {1: not answers, 2: not shows_errors}
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", module, *words],
                {name: value for name, value in os.environ.items() if name != TOKEN},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, ends, 0),
                    *([(os.POSIX_SPAWN_DUP2, told, 1)] if answers else []),
                    *((os.POSIX_SPAWN_OPEN, each, *nowhere) for each in (1, 2) if is_quiet[each]),
                ],
                setsid=True,
            )
        finally:
            os.close(ends)
            os.close(told)
        with os.fdopen(read, encoding="utf-8") as file:
            text = file.read() if answers else ""
        self.answer = text.removeprefix(_READY)
        if answers and not text.startswith(_READY):
            status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            raise (UsageError if status == 2 else HostError)(text or f"{module} has ended early.")

    def finish(self, text: str, within_s: float) -> None:
        """Write that to its standard input, and wait for its end; kill it after that time."""
        try:
            os.write(self._ours, text.encode())
        except BrokenPipeError:
            within_s = 0.0  # it has ended
        os.close(self._ours)
        deadline = time.monotonic() + within_s
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(_POLL_S)


def answer_launcher(text: str, *, is_ready: bool = True) -> None:
    """As such a program, answer the launcher, which has waited for that."""
    sys.stdout.write(_READY + text if is_ready else text)
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
