"""`record`: a decorator for a worker's main function that writes its error where launchers look.

It is the same as torch's `torch.distributed.elastic.multiprocessing.errors.record`, and torchrun
reads its files. Under `rallypoint run` tracebacks are reported without it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def record(function: Callable[P, R]) -> Callable[P, R]:
    """Write an exception that leaves `function` to TORCHELASTIC_ERROR_FILE, and let it pass.

    The file is torch's error.json: message.message, message.extraInfo.{py_callstack, timestamp}.
    """

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except SystemExit as error:
            if error.code not in (0, None):
                _write(error)
            raise
        except BaseException as error:
            # A failed launch has left its workers' root cause there, which is more informative.
            if not getattr(error, "is_in_error_file", False):
                _write(error)
            raise

    return recorded


def write_error(path: str, *, error: str, traceback: str, time_s: float) -> None:
    """Write an error file: `error` is ``"TypeName: message"``, `time_s` seconds since the epoch.

    What cannot be written is left out: it must not replace the error that it tells of.
    """
    import json

    extra = {"py_callstack": traceback, "timestamp": str(int(time_s))}
    try:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - workers pay for pathlib
            json.dump({"message": {"message": error, "extraInfo": extra}}, file)
    except OSError:
        return


def _write(error: BaseException) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    import time
    import traceback

    write_error(
        path,
        error=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        time_s=time.time(),
    )
