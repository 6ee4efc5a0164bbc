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


def _write(error: BaseException) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        from rallypoint.base.fatal_error import report_of, write_report

        write_report(path, report_of(error, error.__traceback__))
    except Exception:  # it must never replace the error that it reports
        return
