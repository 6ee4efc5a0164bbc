"""`record`: a decorator for a worker's main function that leaves its error where launchers look.

The same as torch's `torch.distributed.elastic.multiprocessing.errors.record`, and read by torchrun
too: under `rallypoint run` tracebacks are told without it.
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
            _write(error)
            raise

    return recorded


def _write(error: BaseException) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    import json
    import time
    import traceback

    fields = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
        }
    }
    try:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - workers pay for pathlib
            json.dump(fields, file)
    except OSError:
        return  # it must not replace the error that it tells of
